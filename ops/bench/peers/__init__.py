"""The engines that `furrow bench compare` measures, Furrow's own included, each behind the same small protocol.

`loops` run inside a process of their own, under whichever interpreter has them, and import nothing of Furrow but this
package and the alphabet; `servers` are asked over HTTP.
"""
