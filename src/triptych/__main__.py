"""`python -m triptych` is the `triptych` command."""

from triptych.cli.main import main

if __name__ == "__main__":
    main()
