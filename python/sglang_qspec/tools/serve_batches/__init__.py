"""`qspec serve-batches`: a service with OpenAI's API of files and batches.

`app` has the HTTP routes, `service` what they do, `store` the state of files and batches, and
`files` their contents. `feed` hands the lines of all running batches to the servers, by the
order of `policy.deadlines`; reader, pool and records are those of `tools.batch`.
"""
