"""`lockstep` and `python -m lockstep`, which is how the launcher starts each rank."""

from lockstep.processes import ignore_interrupts, quit_on_interrupt


def main() -> None:
    """Run a command; Ctrl-C is answered without a traceback while its modules are still being read."""
    with quit_on_interrupt():
        from lockstep import cli
    try:
        cli.main()
    finally:
        ignore_interrupts()


if __name__ == "__main__":
    main()
