"""The command line: it reads configs, calls recipes and turns errors into one clear line."""
