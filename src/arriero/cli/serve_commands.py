"""``arriero chat`` and ``arriero serve``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from arriero.cli import options
from arriero.cli.folders import loadable
from arriero.errors import UserError


def chat_command(
    model: options.Model,
    max_new_tokens: options.MaxNewTokens = 512,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    quantize: options.Quantize = None,
    system: Annotated[str, typer.Option("--system", help="What the model is told first.", show_default=False)] = "",
) -> None:
    """Talk with a model in the terminal; /help there lists what else it does.

    Example: arriero chat runs/my-run --system "Answer in one sentence."
    """
    from tempfile import TemporaryDirectory

    from arriero.inference.batching import Batcher
    from arriero.inference.chat import Conversation
    from arriero.inference.generate import load_for_generation
    from arriero.inference.sampling import Sampling

    ends = tuple(stop or ())
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, ends, min_p=min_p)
    with TemporaryDirectory(prefix="arriero-chat-") as aside:
        name, folder = next(iter(loadable(model, Path(aside)).items()))
        loaded, tokenizer = load_for_generation(folder(), quantize=quantize)
    batcher = Batcher(loaded, tokenizer, max_rows=1)
    try:
        conversation = Conversation(
            batcher,
            sampling,
            say=lambda text: typer.echo(text, nl=False),
            note=lambda text: typer.echo(text, err=True),
        )
        if not conversation.chat:
            typer.echo(
                f"{name} has no chat template: it wasn't trained to converse. Each line is a text that it continues.",
                err=True,
            )
        if system:
            conversation.talk([f"/system {system}"])
        conversation.talk(_typed() if sys.stdin.isatty() else (line.rstrip("\n") for line in sys.stdin))
    finally:
        # Python aborts where a thread is within PyTorch when it ends.
        batcher.close(finish=False)


def _typed() -> Iterator[str]:
    """Lines typed at a terminal, until Ctrl-D."""
    import readline  # noqa: F401  (gives input() its history and editing)

    typer.echo("/help lists what else there is; /quit or Ctrl-D ends.", err=True)
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo("", err=True)
            return
        except KeyboardInterrupt:
            typer.echo("\n/quit or Ctrl-D ends", err=True)


def serve_command(
    model: options.Model,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; the default is for this machine alone.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="ARRIERO_API_KEY", help="Clients must send it.", show_default=False),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What clients call the model; default: its folder's name.")
    ] = None,
    max_running: Annotated[int, typer.Option("--max-running", min=1, help="Choices generated at the same time.")] = 16,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Further ones that may wait; beyond them: 429.")
    ] = 256,
    max_request_bytes: Annotated[int, typer.Option("--max-request-bytes", min=1, help="Larger requests: 413.")] = 1
    << 20,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens", min=1, help="Tokens of a request that doesn't say; default: 16, or a whole chat."
        ),
    ] = None,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    quantize: options.Quantize = None,
    engine: Annotated[str, typer.Option("--engine", help="arriero or vllm.")] = "arriero",
) -> None:
    """An OpenAI-compatible server, with a page to try the model at /.

    Example: arriero serve runs/my-run --port 8000
    """
    from tempfile import TemporaryDirectory

    if api_key == "":
        raise UserError("the API key is empty", "Leave --api-key and ARRIERO_API_KEY out to serve without one.")
    if engine == "vllm":
        _serve_with_vllm(model, host, port, api_key, name)
    if engine != "arriero":
        raise UserError(f"--engine {engine}: expected arriero or vllm")
    try:
        from arriero.inference import serve
        from arriero.inference.sampling import Sampling
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("arriero"):
            raise
        raise UserError(f"serving needs {error.name}", "Install it: pip install 'arriero[serve]'") from None
    with TemporaryDirectory(prefix="arriero-serve-") as aside:
        folders = loadable(model, Path(aside), name)
        limits = serve.Limits(max_running, max_waiting, max_request_bytes)
        ends = tuple(stop or ())
        sampling = Sampling(1, temperature, top_p, top_k, repetition_penalty, seed, ends, ignore_eos, min_p)
        defaults = serve.Defaults(sampling, max_new_tokens)
        with serve.listen(host, port) as at:
            if api_key is None and host not in {"127.0.0.1", "::1", "localhost"}:
                typer.echo(f"warning: anybody who reaches {host} can use this server: give it an --api-key", err=True)
            models = serve.Models(folders, limits, alias=str(model), quantize=quantize)
            serve.run(models, limits, defaults, at, api_key=api_key)


def _serve_with_vllm(model: Path, host: str, port: int, api_key: str | None, name: str | None) -> None:
    """Become vLLM's own server on the exported folder."""
    import importlib.util
    import os

    folder = model / "final" if (model / "final" / "config.json").is_file() else model
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{model} has no exported model, which vLLM needs", f"Write it first: arriero export {model} --out FOLDER"
        )
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "vLLM isn't installed here",
            "Install it: pip install vllm (it pins its own torch and transformers, so give it an environment of its own "
            "and install arriero there without the lock).",
        )
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", name or model.resolve().name, "--host", host, "--port", str(port)]
    command += ["--api-key", api_key] if api_key else []
    os.execv(sys.executable, command)
