/* How does a test send and receive by NCCL without a GPU? By a library with NCCL's calls, its
 * arguments and its order of things, whose memory is the host's and whose wire is a socket. The id
 * begins with that socket's path, in the folder that NCCL_DOUBLE_FOLDER names. Each call is
 * announced and must be the same on both ranks, as in NCCL, where it would hang; here it fails. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int rank, peer; } Comm;
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum { BROADCAST = 1, ALL_REDUCE = 2 };

static const size_t TYPE_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1};

static int whole(int fd, void *data, size_t size, int writes) {
    for (size_t done = 0; done < size;) {
        char *at = (char *)data + done;
        ssize_t n = writes ? send(fd, at, size - done, MSG_NOSIGNAL) : read(fd, at, size - done);
        if (n <= 0) return REMOTE_ERROR;
        done += (size_t)n;
    }
    return SUCCESS;
}

static int agree(Comm *comm, uint64_t call, uint64_t count, uint64_t type) {
    uint64_t mine[3] = {call, count, type}, theirs[3];
    int code = whole(comm->peer, mine, sizeof mine, 1);
    if (code == SUCCESS) code = whole(comm->peer, theirs, sizeof theirs, 0);
    return code ? code : memcmp(mine, theirs, sizeof mine) ? INVALID_ARGUMENT : SUCCESS;
}

int ncclGetVersion(int *version) {
    *version = 22907;
    return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId *id) {
    static int made;
    const char *folder = getenv("NCCL_DOUBLE_FOLDER");
    memset(id, 0, sizeof *id);
    if (folder == NULL) return SYSTEM_ERROR;
    snprintf(id->internal, sizeof id->internal, "%s/%d.%d", folder, (int)getpid(), made++);
    return SUCCESS;
}

int ncclCommInitRank(Comm **comm, int ranks, ncclUniqueId id, int rank) {
    if (ranks != 2 || rank < 0 || rank > 1) return INVALID_ARGUMENT;
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    strncpy(where.sun_path, id.internal, sizeof where.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), peer = fd;
    struct timeval patience = {60, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (rank == 0) {
        if (bind(fd, (void *)&where, sizeof where) || listen(fd, 1)) return SYSTEM_ERROR;
        peer = accept(fd, NULL, NULL);
        close(fd);
        setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    } else {
        for (int tries = 0; connect(fd, (void *)&where, sizeof where); tries++) {
            if (tries == 60000) return SYSTEM_ERROR;
            usleep(1000);
        }
    }
    if (peer < 0) return SYSTEM_ERROR;
    *comm = malloc(sizeof **comm);
    **comm = (Comm){rank, peer};
    return SUCCESS;
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm,
                  void *stream) {
    if (stream != NULL || root != 0) return INVALID_ARGUMENT;
    int code = agree(comm, BROADCAST, count, (uint64_t)type);
    void *data = comm->rank == root ? (void *)from : to;
    return code ? code : whole(comm->peer, data, count * TYPE_BYTES[type], comm->rank == root);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, Comm *comm,
                  void *stream) {
    if (stream != NULL || count != 1 || type != 7 || op != 0) return INVALID_ARGUMENT;
    int code = agree(comm, ALL_REDUCE, count, (uint64_t)type);
    float mine = *(const float *)from, theirs;
    if (!code) code = whole(comm->peer, &mine, sizeof mine, 1);
    if (!code) code = whole(comm->peer, &theirs, sizeof theirs, 0);
    *(float *)to = mine + theirs;
    return code;
}

/* Another thread may be in one of its calls, so that nothing is freed. */
int ncclCommAbort(Comm *comm) {
    shutdown(comm->peer, SHUT_RDWR);
    return SUCCESS;
}

int ncclCommDestroy(Comm *comm) { return ncclCommAbort(comm); }

/* vLLM looks for these, and calls none of them to be given weights. */
#define NEVER_CALLED(name) int name(void) { return INVALID_ARGUMENT; }
NEVER_CALLED(ncclReduce)
NEVER_CALLED(ncclAllGather)
NEVER_CALLED(ncclReduceScatter)
NEVER_CALLED(ncclSend)
NEVER_CALLED(ncclRecv)
NEVER_CALLED(ncclGroupStart)
NEVER_CALLED(ncclGroupEnd)
NEVER_CALLED(ncclCommSuspend)
NEVER_CALLED(ncclCommResume)
NEVER_CALLED(ncclCommWindowRegister)
NEVER_CALLED(ncclCommWindowDeregister)

const char *ncclGetErrorString(int code) {
    return code == INVALID_ARGUMENT ? "invalid argument"
           : code == REMOTE_ERROR   ? "remote process exited or there was a network error"
                                    : "unhandled system error";
}
