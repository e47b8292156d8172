"""How torchrun's launcher lets ranks of one machine meet: by a store on the loopback, and by nothing else.

Its own rendezvous listens on every address and unpickles what it finds in the store, so that whoever reached the
machine could run commands as the run's user. One node that never changes needs neither.
"""

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.comm.meeting import LOOPBACK, keep_store, open_listener
from lockstep.engine.places import Places

NAME = "lockstep-loopback"
TIMEOUT_S = 600.0


class LoopbackRendezvous(RendezvousHandler):
    """One node, one store that its ranks reach over the loopback."""

    def __init__(self, run_id: str, places: Places) -> None:
        self._run_id = run_id
        self._places = places
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
        """A place that is to be tried again is to the agent as a node that has come: all ranks start anew with it."""
        return int(self._places.is_waiting)

    def shutdown(self) -> bool:
        return True
