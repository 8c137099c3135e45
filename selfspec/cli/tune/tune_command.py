"""`selfspec tune`: fits a tree to a model and a machine, and puts it into a cache."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt
from cyclopts.validators import Number
from rich import box
from rich.console import Console
from rich.table import Table

from selfspec.building.progress import Bars
from selfspec.cli.generate import check_output
from selfspec.cli.shared.messages import working
from selfspec.cli.shared.options import DraftOptions, Model, RunOptions
from selfspec.cli.shared.writer import checked, opened
from selfspec.config import SpecConfig
from selfspec.errors import CliError
from selfspec.serving.prompt_files import read_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selfspec.building.tuning import Counted
    from selfspec.cache import CacheContents
    from selfspec.cli.shared.model_loading import Loaded
    from selfspec.cost import CostCurve
    from selfspec.fitting import Fit

_SHOWN = (2, 4, 8, 16, 32, 64)  # The widths of the paper's table.


def tune(
    model: Model,
    /,
    *,
    data: Path,
    out: Path,
    max_new_tokens: PositiveInt = 128,
    width: Annotated[int | None, Parameter(validator=Number(gte=2, lte=64))] = None,
    report: Path | None = None,
    asked: RunOptions = RunOptions(),
) -> None:
    """Fit one tree shape to a model and this machine, for use with --budget fitted.

    Args:
        data: A file of prompts like those to come, one a line in JSON, as 'selfspec batch' reads
            them. Some dozen are enough.
        out: The cache folder for the tree. If it exists, drafts start with what it holds, and the
            tree is added to it.
        max_new_tokens: Stop an answer after this number of new tokens.
        width: Keep the tree of this width, for example for another device. Default: the width with
            the most tokens a second here.
        report: Write a page with pictures to this new file: trees, and how often candidates were
            right.
    """
    loading = replace(asked, model=model)
    checked(loading, SpecConfig())
    check_output(report, "--report")
    prompts = read_prompts(data, "--data")
    with _opened(loading, out) as (loaded, contents):
        from selfspec.batch.prompts import encoded

        reader = loaded.tokenizer
        ids = [encoded(line.prompt_for(reader), reader) for line in prompts]
        for number, prompt in enumerate(ids, start=1):
            loaded.check_length(len(prompt), max_new_tokens, f" {number} of --data")
        curve = _measured_costs(loaded.model, ids, max_new_tokens)
        grown, shaped, fits = _counted(loaded.model, ids, contents, curve, max_new_tokens)
    from selfspec.cache import save_cache
    from selfspec.fitting import best_fit

    chosen = best_fit(fits) if width is None else _of_width(fits, width)
    save_cache(out, replace(contents, fitted=chosen.tree), overwrite=True)
    console = Console()
    console.print(_table(fits, chosen, curve))
    for line in _remarks(grown, shaped, chosen, curve, out):
        console.print(line, highlight=False, soft_wrap=True)
    if report is not None:
        from selfspec.cli.tune.tune_page import write_report

        write_report(report, grown.counts, shaped.counts, fits, chosen)
        console.print(f"report: {report}", highlight=False, soft_wrap=True)


@contextmanager
def _opened(loading: RunOptions, out: Path) -> Iterator[tuple[Loaded, CacheContents]]:
    """The model, and what the cache holds so far; a file that can't be used is told first."""
    with working(f"Loading {loading.title}"):
        from selfspec.cache import CacheContents, check_target, tokenizer_info

        target = check_target(out, overwrite=True)
        held = str(target) if target.exists() else None
        loaded, start = opened(DraftOptions(**{**vars(loading), "cache": held}))
    yield loaded, start.cache or CacheContents(tokenizer=tokenizer_info(loaded.tokenizer))


def _measured_costs(model: Any, ids: Sequence[Sequence[int]], max_new_tokens: int) -> CostCurve:
    """What forwards cost behind a text as long as these are in their middle."""
    from selfspec.config import SpecConfig
    from selfspec.run.profile import profile

    with working("Measuring forwards of each width"):
        length = int(median(map(len, ids))) + max_new_tokens // 2
        _, curve = profile(model, SpecConfig(), num_columns=length, num_rows=1, max_seconds=10.0)
    return curve


def _counted(
    model: Any,
    ids: Sequence[Sequence[int]],
    contents: CacheContents,
    curve: CostCurve,
    max_new_tokens: int,
) -> tuple[Counted, Counted, list[Fit]]:
    """Both rounds over the prompts, and the trees fitted to the second one."""
    from selfspec.building.tuning import MOST_NODES, count, fits_of, start_shape
    from selfspec.config import SpecConfig

    max_depth = SpecConfig().max_depth
    with Bars(Console(stderr=True)) as bars:
        step = curve.seconds(MOST_NODES)
        most = 2 * len(ids) * max_new_tokens * step / 60
        bars.say(
            f"Answering {len(ids)} prompts twice with up to {max_new_tokens} tokens: {most:.1f} "
            f"minutes at most, at {1000 * step:.0f} ms a step"
        )

        def counted(title: str, held: CacheContents, **knobs: Any) -> Counted:
            tell = partial(bars.stage(title, len(ids)).advance, 1)
            return count(model, ids, held, max_new_tokens=max_new_tokens, tell=tell, **knobs)

        grown = counted("Trees that grow", replace(contents, fitted=None))
        shaped = counted("One shape", start_shape(grown, contents, max_depth), budget="fitted")
        return grown, shaped, fits_of(shaped, curve, max_depth)


def _of_width(fits: Sequence[Fit], width: int) -> Fit:
    found = {fit.tree.width: fit for fit in fits}
    if width not in found:
        raise CliError(
            f"--width must be at most {max(found)}, as many nodes as came true somewhere (got "
            f"{width}); give more prompts"
        )
    return found[width]


def _table(fits: Sequence[Fit], chosen: Fit, curve: CostCurve) -> Table:
    """A line for some widths and for the chosen one."""
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("width", "tokens a step", "ms", "tokens a second", ""):
        table.add_column(title, justify="right")
    plain = curve.seconds(1)
    table.add_row("1", "1.00", f"{1000 * plain:.1f}", f"{1 / plain:.1f}", "plain")
    for fit in fits:
        if fit.tree.width in _SHOWN or fit is chosen:
            table.add_row(
                str(fit.tree.width),
                f"{fit.tree.expected:.2f}",
                f"{1000 * fit.seconds:.1f}",
                f"{fit.rate:.1f}",
                "kept" if fit is chosen else "",
            )
    return table


def _remarks(
    grown: Counted, shaped: Counted, chosen: Fit, curve: CostCurve, out: Path
) -> Iterator[str]:
    """What the table does not say."""
    grown_rate, shaped_rate = (each.stats.tokens_per_step for each in (grown, shaped))
    yield (
        f"On these prompts, trees of 64 nodes brought {grown_rate:.2f} tokens a step where each "
        f"grew anew, and {shaped_rate:.2f} with one shape."
    )
    if chosen.rate <= 1 / curve.seconds(1):
        yield "Plain decoding is no slower here than with the tree that was kept."
    yield (
        f"{out} holds a tree of {chosen.tree.width} nodes; use it with "
        f"SelfSpec.from_pretrained({str(out)!r}, budget='fitted'), or --cache and --budget fitted."
    )
