"""How torchrun's launcher lets ranks of one machine meet: by a store on the loopback, and by nothing else.

Its own rendezvous listens on every address and unpickles what it finds in the store, so that whoever reached the
machine could run commands as the run's user. One node that never changes needs neither.
"""

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lockstep.comm.meeting import LOOPBACK, keep_store, open_listener

NAME = "lockstep-loopback"
TIMEOUT_S = 600.0


class LoopbackRendezvous(RendezvousHandler):
    """One node, one store that its ranks reach over the loopback."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        listener = open_listener(LOOPBACK, 0)
        self._port = int(listener.getsockname()[1])
        self._ranks_store = keep_store(listener, 1, TIMEOUT_S, waits=False)

    def next_rendezvous(self) -> RendezvousInfo:
        """The only node is the first; what its agent writes down for other agents stays in its own memory."""
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, self._port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def _build(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def register_rendezvous() -> str:
    """Make it known to torchrun's launcher; returns the name to ask for it by."""
    rendezvous_handler_registry.register(NAME, _build)
    return NAME
