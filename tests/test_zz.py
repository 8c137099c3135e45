import random, sys, torch
from tests.batch.test_isolation import alone, wild
from tests.fakes import tiny_model, tiny_tokenizer
from selfspec.batch.session import Session
from tests.recorder import use_recorders
import pytest
import faulthandler; faulthandler.dump_traceback_later(25, exit=True)
def test_x(monkeypatch):
    log=use_recorders(monkeypatch)
    for name in ("llama","gemma3"):
        spec=wild(); model=tiny_model(name)
        s=Session(model, tiny_tokenizer(), spec, max_rows=3)
        d=random.Random(1); given=[[d.randrange(3,90) for _ in range(d.randrange(1,40))] for _ in range(8)]
        for i,ids in enumerate(given): s.submit(i, ids, i, {"max_new_tokens": d.randrange(5,30)})
        out={}
        while not s.is_empty:
            for a in s.work(): out[a.index]=a
        for i,ids in enumerate(given):
            a=out[i]; assert a.error is None, a.error
            assert a.ids==alone(model, ids, i, max_new_tokens=len(a.ids)), i
            print(a.stats.forward, a.stats.eager_reason)
        print(len(log), log.count("capture"), log.count("replay"))
