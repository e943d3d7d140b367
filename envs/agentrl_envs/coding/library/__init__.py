"""The sound modules that generated packages are made of. Pure functions; a docstring says exactly what each returns.

The text of these files becomes a task's source code, one defect put in; `inputs.py` draws what they are tested with.
"""
