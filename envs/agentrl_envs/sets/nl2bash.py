"""NL2Bash as in InterCode: 200 requests with the command that answers each, over four file trees.

The trees (`fs_N.json`: path, type, mode, mtime, text) are what the repository's set-up scripts make.
"""

from ..data import DataSet, File

_TREES = {
    1: "639c9a810cf8e012eebc2cbea6a24938fe5764f081edae70235e79b259d0218f",
    2: "c4748482127ee85b6b6e99ec3fd89b1b10ec69b1fff60dada69f1d28470c222b",
    3: "2df00b764820c75c338f059c90d585cf9ece91c9952265b596016b4b3454521d",
    4: "4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945",
}
_ROWS = {
    1: "2b6d07659ac3ac180cab431bec4acd680c9d3b01a915733c24e908e3ea2e07a1",
    2: "0f708b6ee96253cff193ef198f170330294b201f3d26aa9dada6d86059e0444d",
    3: "d3b78a338e0991820493850a16115b209a33c2a0d2d3686979b80986b124d5b5",
    4: "895f3db2f4f25221c4de1c693e9e96c17f86d4b10cc0399c41f80d7f7ff58eb8",
}
NL2BASH = DataSet(
    name="nl2bash",
    repository="princeton-nlp/intercode",
    commit="c3e46d827cfc9d4c704ec078f7abf9f41e3191d8",
    licence="MIT",
    files={
        **{f"fs_{n}.json": File(origin=None, sha256=digest) for n, digest in _TREES.items()},
        **{
            f"nl2bash_fs_{n}.json": File(origin=f"data/nl2bash/nl2bash_fs_{n}.json", sha256=digest)
            for n, digest in _ROWS.items()
        },
    },
)
