"""Function calls: how chat templates take tools, how model families write calls, and how calls are read back.

`spec` has what a request asks for, `template` finds out what a template does, one file for each format says how a family
writes calls, `parser` reads them from a stream of text and `grammar` lets a model write nothing else. Nothing here knows of
HTTP or runs a model. Called by `engine/prompt`, `engine/intake` and `api/calls`.
"""
