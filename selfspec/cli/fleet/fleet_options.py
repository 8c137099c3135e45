"""`--ray` and `--num-workers`: the workers of a command, started quietly and ended with it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, echo

from selfspec.cli.shared.messages import working
from selfspec.errors import CliError

if TYPE_CHECKING:
    from selfspec.fleet import Fleet, Work

_DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Whether the work is spread over workers, and how many."""

    ray: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            help="Spread the work over workers on Ray, each with a model of its own. local: on "
            "this machine. auto: on all machines of the Ray to which this one belongs. host:port: "
            "on all machines of the Ray with this head node. Needs Ray (pip install ray). "
            "Default: work in this process.",
        ),
    ] = None
    num_workers: Annotated[
        int | None,
        Option(
            min=1,
            help="With --ray: how many workers. Default: one for each GPU, or one for each machine "
            "if there is no GPU.",
        ),
    ] = None

    def check(self, device: str) -> None:
        """Refuses what can't be, before anything is started."""
        if self.ray is None:
            if self.num_workers is not None:
                raise CliError(
                    f"--num-workers needs --ray (got {self.num_workers} and no --ray); "
                    "add --ray local for workers on this machine"
                )
            return
        if device not in _DEVICES:
            raise CliError(
                f"--device must be auto, cpu or cuda with --ray, which gives each worker a GPU of "
                f"its own (got {device!r})"
            )
        from selfspec.fleet import check_address

        check_address(self.ray)


@contextmanager
def fleet(
    options: FleetOptions,
    device: str,
    opened: Callable[[], AbstractContextManager[Work]],
    *,
    jobs_each: int = 1,
) -> Iterator[Fleet[Any]]:
    """Workers of which one at least is ready; `opened` makes in each what does the jobs."""
    from selfspec.fleet import Fleet, connected, divided

    assert options.ray is not None
    with ExitStack() as stack:
        with working("Starting workers on Ray") as say:
            stack.enter_context(connected(options.ray))
            # So that workers can save what they learned; Ray would end everything.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            number, share = divided(options.num_workers, device)
            cores = f"{share.num_cpus:.3g} cores" + ", a GPU" * share.num_gpus
            say(f"Starting workers on Ray: {number}, each with {cores}")
            workers: Fleet[Any] = Fleet(opened, number, share, jobs_each=jobs_each)
            stack.enter_context(workers).wait()
        try:
            yield workers
        except KeyboardInterrupt:
            echo("Stopping the workers ...", err=True)
            raise
