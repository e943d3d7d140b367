"""Spider 1.0, the development set as InterCode has it: questions and gold queries over 20 databases.

The databases were converted to SQLite from one MySQL dump and cannot be fetched as files.
"""

from __future__ import annotations

from ..data import DataSet, File

_DATABASES = {
    "battle_death": "e9214185235d91693ad181fe671123d3d677bdc64ef40671ed759a8b06a99bf0",
    "car_1": "a3f6220c72dad5d0d998cb145df9650d3a95400977a81faed4125a914a4cc217",
    "concert_singer": "33d395cf17986f220ed50cdeab7dfd5aac18e0cea556f70e802b7ac10f2e7f0e",
    "course_teach": "f3fcfb216775e9261035c400e9daa966523bfe91abd1b923026451da2428d9e6",
    "cre_Doc_Template_Mgt": "ac383111fb0d5d35e9b13d7853c3a67cbfb0edd30cc866515dc02e9b9f6ad4d0",
    "dog_kennels": "34371f2bac0e57ba5c710d0fc92a9649bf3a5bca89ecb6ce52fbc01e3377f16e",
    "employee_hire_evaluation": "074412abbae6785b55d16bdfaffabff8b2c0c80e4ad6d3a01acbf3e0ca2979cd",
    "flight_2": "b83f1567117eb9e95d31bcb7a8009e54b43a8d737a14f66b31a14f87607adfe4",
    "museum_visit": "ece6ccfa1df5fb6a6bc4f3fe0c6a702238574b9599a843f8dbd4bbc82709e384",
    "network_1": "d3d0bd48a11247a5967e9c6f395b5891a867b6fafb1495474097c0703e846713",
    "orchestra": "472ad0f50d7b79a9e90efaa947d703a03daf14cad252c0f3445e450a47d27352",
    "pets_1": "85aa92ffbca4319977410ac6b332d5d8fae45093b9a501c9bf427cdb8ad907aa",
    "poker_player": "1fffe362ea299710cfcf3adc475e316de0c1da536b5b86126e98371a01e6926e",
    "real_estate_properties": "2c0399993cc215cfdee7fe01fe71c593d43eb43b137fc48b48fc48c3979f25c5",
    "singer": "51ad4e52d164d7d2159abbc2817149b15098815358dbf9c01cd845e8dd456a8a",
    "student_transcripts_tracking": "f9f0915ddb271e10eab8478248e0ec49c18f30dbc7947e0f16ffe485762ba017",
    "tvshow": "76409bf91d45652408c37d10abd0b356677e7190f42a05f20fe67f378ee442ad",
    "voter_1": "062840c86218f09142118db61b7053965c51d5241776a2073589212a3b435616",
    "world_1": "b483042f6b098d22b6d8133dbbf009d4c9f3d30eeec3422bc4b2fec6b9886faa",
    "wta_1": "5920df86657eb67e109b2f801b3934aa6e2a3b94d4ad9e1da8035dfee8eb0631",
}

SPIDER = DataSet(
    name="spider_dev",
    repository="princeton-nlp/intercode",
    commit="c3e46d827cfc9d4c704ec078f7abf9f41e3191d8",
    licence="CC BY-SA 4.0",
    files={
        "ic_spider_dev.json": File(
            origin="data/sql/spider/ic_spider_dev.json",
            sha256="4bcd7c9ecbf4fd879d9b925f28890419d1edf8befc362fa5cffe7af633dcc79b",
        ),
        **{f"databases/{name}.sqlite": File(origin=None, sha256=sha256) for name, sha256 in _DATABASES.items()},
    },
)
