"""What Python loads at the start of every process of a tormented run: it holds a rank's interpreter when asked, and
notes when Lockstep's own code has taken over from Python's start.

Ranks may be started by name or forked from a launcher that has this loaded already and learn their rank later, so the
thread that watches starts in either, and waits until there is a rank. Torch-free.
"""

FOLDER = "LOCKSTEP_CHAOS_HOLD"  # the variable that names the folder; a file in it, named for a rank, holds microseconds

# The file there that says Lockstep's code has taken over: `__main__.py` answers interrupts when it imports `cli.py`.
TAKEN_OVER = "taken-over"

TEXT = f"""
import os, sys, threading
def watch(folder):
    import ctypes, time
    while True:
        time.sleep(0.05)
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
def note_import(folder):
    def hear(event, details):
        if event == "import" and details[0] == "lockstep.cli":
            try:
                open(os.path.join(folder, "{TAKEN_OVER}"), "w").close()
            except OSError:
                pass
    sys.addaudithook(hear)
if os.environ.get("{FOLDER}"):
    note_import(os.environ["{FOLDER}"])
    if os.environ.get("RANK"):
        start()
    os.register_at_fork(after_in_child=start)
"""
