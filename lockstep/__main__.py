"""`python -m lockstep`, which is how the launcher starts each rank."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
