from lockstep.api import Result as Result
from lockstep.api import evaluate as evaluate
from lockstep.api import export as export
from lockstep.api import load as load
from lockstep.api import predict as predict
from lockstep.api import train as train
from lockstep.errors import LockstepError as LockstepError
from lockstep.errors import Stop as Stop

__version__: str
