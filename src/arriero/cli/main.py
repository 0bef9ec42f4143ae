"""Every command, by name. Nothing heavy is imported here: `arriero --help` must start in well under half a second."""

from __future__ import annotations

import typer

from arriero.cli import (
    check_commands,
    data_commands,
    generate_command,
    info_commands,
    launch_commands,
    model_commands,
    plan_commands,
    recipe_commands,
    report_commands,
    run_commands,
    serve_commands,
)

app = typer.Typer(
    help="Raw text in, a trained and served LLaMA-family model out, on DeepSpeed. Start with: arriero demo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
tokenizer = typer.Typer(help="Make a tokenizer.", no_args_is_help=True)
data = typer.Typer(help="Look into prepared data.", no_args_is_help=True)
recipes = typer.Typer(help="The recipes that are shipped.", no_args_is_help=True)
checkpoints = typer.Typer(help="What is on disk, and whether it is intact.", no_args_is_help=True)


@app.callback(invoke_without_command=True)
def _version(
    version: bool = typer.Option(False, "--version", help="Print the version and stop."),
    local_rank: int = typer.Option(0, "--local_rank", "--local-rank", hidden=True),
) -> None:
    # DeepSpeed's launcher puts --local_rank=N in front of the command; ranks read it from the environment.
    if version:
        from arriero.__version__ import __version__

        typer.echo(f"arriero {__version__}")
        raise typer.Exit


app.command("demo")(run_commands.demo_command)
app.add_typer(tokenizer, name="tokenizer")
tokenizer.command("train")(data_commands.tokenizer_train)
app.command("prepare")(data_commands.prepare_command)
app.add_typer(data, name="data")
data.command("show")(run_commands.data_show)
data.command("seen")(run_commands.data_seen)
data.command("stats")(data_commands.data_stats)
app.command("report")(report_commands.report_command)
app.command("plan")(plan_commands.plan_command)
app.command("train")(run_commands.train_command)
app.command("launch")(launch_commands.launch_command)
app.command("check")(check_commands.check_command)
app.command("eval")(model_commands.eval_command)
app.command("export")(model_commands.export_command)
app.command("generate")(generate_command.generate_command)
app.command("chat")(serve_commands.chat_command)
app.command("serve")(serve_commands.serve_command)
app.add_typer(checkpoints, name="checkpoints")
checkpoints.command("list")(model_commands.checkpoints_list)
checkpoints.command("verify")(model_commands.checkpoints_verify)
checkpoints.command("prune")(model_commands.checkpoints_prune)
app.add_typer(recipes, name="recipes")
recipes.command("list")(recipe_commands.recipes_list)
recipes.command("show")(recipe_commands.recipes_show)
recipes.command("copy")(recipe_commands.recipes_copy)
recipes.command("convert")(recipe_commands.recipes_convert)
recipes.command("new")(recipe_commands.recipes_new)
app.command("keys")(info_commands.keys_command)
app.command("doctor")(info_commands.doctor_command)
