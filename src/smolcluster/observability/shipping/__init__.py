"""The logs of one run, pushed to Loki from a machine that has neither Promtail nor Alloy.

    log files  ->  spool: lines that Loki has not got yet  ->  batch  ->  Loki's HTTP API

The log files are the spool. How far they have been taken is stored when Loki has accepted a batch and not
before: nothing is lost while it is down, and at most one batch is sent twice, with the same time stamps, by
which Loki knows it again.
"""
