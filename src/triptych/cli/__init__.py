"""The `triptych` command: one module per subcommand, imported when that subcommand runs."""
