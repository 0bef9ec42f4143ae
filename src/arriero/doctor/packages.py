"""Installed versions: in our ranges, at peace with one another, importable, no known bad pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from arriero.doctor.finding import Check


@dataclass(frozen=True)
class BadPair:
    """Two installed packages that don't work together, whatever their own metadata says."""

    one: str
    other: str
    reason: str
    remedy: str
    required: bool = False
    """Whether it is training that breaks, or only the other package."""


KNOWN_BAD = (
    BadPair(
        "transformers>=5.1,<5.2",
        "deepspeed",
        "transformers 5.1 broke its ZeRO integration (huggingface/transformers#43780)",
        "pip install 'transformers>=5.16,<6'",
        required=True,
    ),
    BadPair(
        "swanlab<=0.10.3",
        "protobuf>=7",
        "swanlab 0.10 reads its files with protobuf 6",
        "pip install 'protobuf>=6.31,<7'",
    ),
    BadPair(
        "vllm<=0.33",
        "transformers>=5.21",
        "vllm 0.33 is written for transformers below 5.21 and its own torch",
        "install vllm in an environment of its own, or: pip install 'transformers>=5.16.1,<5.21'",
    ),
    BadPair(
        "mosaicml-streaming<=0.13",
        "transformers>=5",
        "mosaicml-streaming 0.13 needs transformers 4 and numpy below 2.2",
        "pip uninstall mosaicml-streaming",
    ),
    BadPair(
        "litgpt<=0.5.13",
        "huggingface-hub>=1.4",
        "litgpt 0.5.13 needs huggingface-hub below 1.4, transformers 5 a newer one",
        "install litgpt in an environment of its own",
    ),
    BadPair(
        "optimum-intel",
        "transformers>=5.6",
        "optimum-intel needs transformers below 5.6",
        "pip uninstall optimum-intel",
    ),
    BadPair(
        "fasttext<=0.9.3",
        "numpy>=2",
        "fasttext 0.9.3 calls what numpy 2 removed",
        "pip uninstall fasttext",
    ),
)


# Why a package matters is said where its absence gives a misleading error (transformers asks for tiktoken when it is
# sentencepiece or protobuf that it misses).
NAMED = {
    "torch": ("torch", ""),
    "deepspeed": ("deepspeed", ""),
    "transformers": ("transformers", ""),
    "tokenizers": ("tokenizers", ""),
    "gigatoken": ("gigatoken", ""),
    "sentencepiece": ("sentencepiece", "reads tokenizer.model (Llama 1 and 2, Mistral)"),
    "protobuf": ("google.protobuf", "reads tokenizer.model (Llama 1 and 2, Mistral)"),
    "tiktoken": ("tiktoken", "reads Llama-3-style rank files"),
}


_OTHER_MODULES = {"pyyaml": "yaml"}


def own_requirements() -> dict[str, Requirement]:
    """Our core dependencies with their ranges, from the installed metadata; empty if arriero isn't installed."""
    try:
        texts = metadata.requires("arriero") or []
    except metadata.PackageNotFoundError:
        return {}
    return {canonicalize_name(requirement.name): requirement for requirement in _applicable(texts)}


def installed_versions() -> dict[str, str]:
    """Version by canonical name of everything that is installed; the first on the path wins, as in an import."""
    versions: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            versions.setdefault(canonicalize_name(name), distribution.version)
    return versions


def package_checks(
    requirements: Mapping[str, Requirement], installed: Mapping[str, str], import_errors: Mapping[str, str | None]
) -> list[Check]:
    """Version in our range and importable: one check for each package that people ask about, one for the rest.

    ``import_errors`` has a module's error, or None where the import worked; a module that is missing in it was never
    reached.
    """
    if not requirements:
        remedy = "pip install arriero  (or, in a source checkout: pip install -e .)"
        return [Check("packages", False, "arriero isn't installed, so its version ranges are unknown", remedy)]
    checks, others = [], []
    for name, requirement in requirements.items():
        module, purpose = NAMED.get(name, (module_of(name), ""))
        problem = _package_problem(requirement, installed.get(name), module, import_errors)
        if name in NAMED:
            words = [installed.get(name, ""), purpose] if problem is None else [problem, purpose]
            detail = "; ".join(word for word in words if word)
            checks.append(Check(name, problem is None, detail, _install(requirement) if problem else ""))
        elif problem is not None:
            others.append((f"{name}: {problem}", requirement))
    checks.sort(key=lambda check: list(NAMED).index(check.name))
    if others:
        remedy = "pip install " + " ".join(f"'{requirement}'" for _, requirement in others)
        checks.append(Check("other packages", False, "; ".join(problem for problem, _ in others), remedy))
    else:
        checks.append(Check("other packages", True, f"{len(requirements) - len(checks)} in their ranges, importable"))
    return checks


def conflict_check(installed: Mapping[str, str]) -> Check:
    """Whether our packages' own requirements hold, and theirs, down to the last: what ``pip check`` asks."""
    problems, seen, queue = [], {"arriero"}, ["arriero"]
    while queue:
        name = queue.pop()
        try:
            texts = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # named as missing by the package that requires it
        for requirement in _applicable(texts):
            needed = canonicalize_name(requirement.name)
            version = installed.get(needed)
            if version is None:
                problems.append((f"{name} needs {requirement}, which is missing", requirement))
            elif not requirement.specifier.contains(version, prereleases=True):
                problems.append((f"{name} needs {requirement}, installed is {version}", requirement))
            if needed not in seen:
                seen.add(needed)
                queue.append(needed)
    if not problems:
        return Check("versions agree", True, f"{len(seen) - 1} packages, no conflict among them")
    remedy = "pip install " + " ".join(dict.fromkeys(f"'{_bare(requirement)}'" for _, requirement in problems))
    return Check("versions agree", False, "; ".join(problem for problem, _ in problems), remedy)


def bad_pair_check(installed: Mapping[str, str]) -> Check:
    """Whether two installed packages are known not to work together."""
    found = [pair for pair in KNOWN_BAD if all(_matches(text, installed) for text in (pair.one, pair.other))]
    if not found:
        return Check("known bad pairs", True, f"none of {len(KNOWN_BAD)} installed")
    return Check(
        "known bad pairs",
        False,
        "; ".join(f"{pair.one} with {pair.other}: {pair.reason}" for pair in found),
        "\n".join(pair.remedy for pair in found),
        required=any(pair.required for pair in found),
    )


def _package_problem(
    requirement: Requirement, version: str | None, module: str, import_errors: Mapping[str, str | None]
) -> str | None:
    if version is None:
        return f"not installed (needs {requirement})"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{version} is outside {requirement.specifier}"
    if module not in import_errors:
        return f"{version}; its import was not reached"
    error = import_errors[module]
    return None if error is None else f"{version}; import fails: {error}"


def _applicable(texts: Sequence[str]) -> Iterator[Requirement]:
    """The requirements that hold here without any extra."""
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _matches(text: str, installed: Mapping[str, str]) -> bool:
    requirement = Requirement(text)
    version = installed.get(canonicalize_name(requirement.name))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def module_of(name: str) -> str:
    return _OTHER_MODULES.get(name, name.replace("-", "_"))


def _bare(requirement: Requirement) -> str:
    return f"{requirement.name}{requirement.specifier}"


def _install(requirement: Requirement) -> str:
    return f"pip install --force-reinstall --no-deps '{_bare(requirement)}'"
