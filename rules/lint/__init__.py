"""What is suspicious in rules that can be used: they are read, understood, and probably not what was meant.

``subject`` is what a check looks at, each file of ``checks`` is one kind of check, ``lint`` runs them all. Nothing here refuses a rule:
that is the language's own work.
"""
