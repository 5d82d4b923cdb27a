"""`qspec batch`: answers the lines of a file with one or several servers.

`lines` reads the input, `pool` hands lines to the servers, `runner` asks each server (`server` is
the interface, `http_server` and `own_server` implement it), and `results` writes the answers.
`partial` keeps what is written of an answer, and `line_guesses` finds the guesses of a line.
"""
