"""`windlass generate`: what a trained model says to a prompt."""

from __future__ import annotations

import click

from windlass.cli.jobs import run_names
from windlass.cli.output import print_json


@click.command(short_help="Go on with a prompt, as a run's model would.")
@click.argument("name", metavar="RUN|FOLDER", shell_complete=run_names)
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=100, show_default=True, help="Tokens at most.")
@click.option(
    "--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0: always the likeliest token."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of what is drawn with a temperature.")
@click.option("--step", type=int, metavar="N", help="Of this checkpoint. Default: the newest complete one.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message, through the tokenizer's chat template.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout, when all is said.")
def generate(
    name: str, prompt: str, max_tokens: int, temperature: float, seed: int, step: int | None, chat: bool, as_json: bool
) -> None:
    """Go on with a prompt, as a run's model would.

    Of a run the newest complete checkpoint is read, an adapter merged into its model; of a FOLDER what `ckpt export`
    wrote, or any Hugging Face model. Tokens are printed as they come. On a GPU where there is one.
    """
    from windlass.trainer.results.generation import generate as generate_text
    from windlass.trainer.results.generation import speaker_of

    speaker = speaker_of(name, step)

    def print_piece(piece: str) -> None:
        if not as_json:
            click.echo(piece, nl=False)

    text, num_tokens, seconds = generate_text(
        speaker, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, chat=chat, say=print_piece
    )
    if as_json:
        print_json(
            {"name": name, "step": speaker.step, "prompt": prompt, "text": text}
            | {"tokens": num_tokens, "seconds": round(seconds, 3)}
        )
    else:
        click.echo()
