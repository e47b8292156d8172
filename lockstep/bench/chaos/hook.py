"""What Python loads at the start of every process of a tormented run: it holds a rank's interpreter when asked, and
notes when Lockstep's own code has taken over from Python's start, and when an evaluation or a checkpoint begins.

The latter two take some 30 ms here, less than it takes to find a victim. Where a fault waits for one, it lingers: an
evaluation before its first batch, a checkpoint before each of its files.

Ranks may be started by name or forked from a launcher that has this loaded already and learn their rank later, so the
thread that watches starts in either, and waits until there is a rank. Torch-free.
"""

FOLDER = "LOCKSTEP_CHAOS_HOLD"  # the variable that names the folder; a file in it, named for a rank, holds microseconds

# The file there that says Lockstep's code has taken over: `__main__.py` answers interrupts when it imports `cli.py`.
TAKEN_OVER = "taken-over"

AWAITED, BEGUN = "-awaited", "-begun"  # files there, for each of the two: a fault waits for it, it has begun
EVALUATION_S, FILE_S = 0.6, 0.15  # how long they linger

TEXT = f"""
import os, sys, threading
def linger(folder, phase, seconds):
    import time
    path = os.path.join(folder, phase)
    if os.path.exists(path + "{AWAITED}"):
        try:
            open(path + "{BEGUN}", "w").close()
        except OSError:
            pass
        time.sleep(seconds)
def note_evaluation(folder, module):
    evaluate = module.eval
    def eval(self):
        linger(folder, "evaluation", {EVALUATION_S})
        return evaluate(self)
    module.eval = eval
def watch(folder):
    import ctypes, time
    is_noted = False
    while True:
        time.sleep(0.05)
        module = getattr(sys.modules.get("torch.nn"), "Module", None)
        if module and not is_noted:
            note_evaluation(folder, module)
            is_noted = True
        rank = os.environ.get("RANK")
        if not rank:
            continue
        path = os.path.join(folder, rank)
        try:
            microseconds = int(open(path).read() or 0)
            os.unlink(path)
        except (OSError, ValueError):
            continue
        ctypes.PyDLL(None).usleep(microseconds)
def start():
    threading.Thread(target=watch, args=(os.environ["{FOLDER}"],), daemon=True).start()
def note_begins(folder):
    def hear(event, details):
        if event == "open" and "/checkpoints/.aside-step-" in str(details[0]) and details[1] == "w":
            linger(folder, "checkpoint", {FILE_S})
        if event == "import" and details[0] == "lockstep.cli":
            try:
                open(os.path.join(folder, "{TAKEN_OVER}"), "w").close()
            except OSError:
                pass
    sys.addaudithook(hear)
if os.environ.get("{FOLDER}"):
    note_begins(os.environ["{FOLDER}"])
    if os.environ.get("RANK"):
        start()
    os.register_at_fork(after_in_child=start)
"""
