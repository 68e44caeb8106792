/* Count what a process does to files below a folder, and its forks; from one of these points on kill it, or fail.
 *
 * Preloaded (LD_PRELOAD), this library sees the calls of Python, C++ and Rust alike. It does nothing until it is armed.
 * A process that dies in a write has written half of it; at any other point it dies just before. Its children keep running.
 * A disk that fails does so for good: each later call fails with the same error, and forks do not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char armed_folder[PATH_MAX];
static pid_t armed_process;
static long deadly_point; /* 0: none */
static int disk_error;    /* 0: die at that point; otherwise the errno of every call from there on */
static char failing_file[NAME_MAX]; /* the disk fails from the first call on a path that holds this; "": at the point */
static int points_log = -1;
static long num_points;

/* Arm this process: die at `point` (from 1; 0 never), and write a line per point to the descriptor `log` (-1: none). */
void crash_arm(const char *folder, long point, int log) {
    snprintf(armed_folder, sizeof armed_folder, "%s", folder);
    deadly_point = point;
    points_log = log;
    armed_process = getpid();
}

/* Let this process's disk fail from `point` on, or from the first call on a path with `file` in it. */
void crash_fail(const char *folder, long point, const char *file, int error) {
    snprintf(failing_file, sizeof failing_file, "%s", file);
    disk_error = error;
    crash_arm(folder, point, -1);
}

static void die(void) {
    kill(armed_process, SIGKILL);
    for (;;) pause();
}

static int is_below(const char *path) {
    size_t length = strlen(armed_folder);
    return strncmp(path, armed_folder, length) == 0 && (path[length] == '/' || path[length] == 0);
}

/* A full disk lets files be removed, renamed and cut. */
static int frees_space(const char *what) {
    return strncmp(what, "unlink", 6) == 0 || strcmp(what, "rmdir") == 0 || strncmp(what, "rename", 6) == 0 ||
           strncmp(what, "ftruncate", 9) == 0;
}

/* Count a point; return 1 where the process must die here, -1 with errno where the call must fail, otherwise 0. */
static int point(const char *what, const char *path) {
    long number = __atomic_add_fetch(&num_points, 1, __ATOMIC_SEQ_CST);
    if (points_log >= 0) dprintf(points_log, "%s %s\n", what, path + (is_below(path) ? strlen(armed_folder) : 0));
    if (disk_error == 0) return number == deadly_point;
    if (deadly_point == 0 && failing_file[0] && strstr(path, failing_file)) deadly_point = number;
    if (deadly_point == 0 || number < deadly_point || strcmp(what, "fork") == 0) return 0;
    if ((disk_error == ENOSPC || disk_error == EDQUOT) && frees_space(what)) return 0;
    errno = disk_error;
    return -1;
}

static int at_path(const char *what, int directory, const char *path) {
    char whole[2 * PATH_MAX] = "", link[64];
    if (armed_process == 0 || getpid() != armed_process) return 0;
    if (path[0] != '/' && directory != AT_FDCWD) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
        ssize_t length = readlink(link, whole, PATH_MAX - 1);
        if (length > 0) snprintf(whole + length, sizeof whole - length, "/%s", path);
    } else {
        snprintf(whole, sizeof whole, "%s", path);
    }
    return is_below(whole) ? point(what, whole) : 0;
}

static int at_file(const char *what, int file) {
    char path[PATH_MAX] = "", link[64];
    if (armed_process == 0 || getpid() != armed_process) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    return readlink(link, path, sizeof path - 1) > 0 && is_below(path) ? point(what, path) : 0;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Die, or return from a call that fails. */
#define AT(point) do { int how = point; if (how < 0) return -1; if (how) die(); } while (0)

ssize_t write(int file, const void *data, size_t size) {
    REAL(write);
    int how = at_file("write", file);
    if (how < 0) return -1;
    if (how) { real(file, data, size / 2); die(); }
    return real(file, data, size);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    REAL(writev);
    int how = at_file("write", file);
    if (how < 0) return -1;
    if (how) { real(file, parts, count / 2); die(); }
    return real(file, parts, count);
}
#define PWRITE(name, offset_type) \
    ssize_t name(int file, const void *data, size_t size, offset_type offset) { \
        REAL(name); \
        int how = at_file("write", file); \
        if (how < 0) return -1; \
        if (how) { real(file, data, size / 2, offset); die(); } \
        return real(file, data, size, offset); \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define AT_FILE(name, parameters, arguments) \
    int name parameters { REAL(name); AT(at_file(#name, file)); return real arguments; }
AT_FILE(fsync, (int file), (file))
AT_FILE(fdatasync, (int file), (file))
AT_FILE(ftruncate, (int file, off_t size), (file, size))
AT_FILE(ftruncate64, (int file, off64_t size), (file, size))

#define AT_PATH(name, directory, parameters, arguments) \
    int name parameters { REAL(name); AT(at_path(#name, directory, path)); return real arguments; }
AT_PATH(rename, AT_FDCWD, (const char *path, const char *to), (path, to))
AT_PATH(renameat, from, (int from, const char *path, int into, const char *to), (from, path, into, to))
AT_PATH(unlink, AT_FDCWD, (const char *path), (path))
AT_PATH(unlinkat, folder, (int folder, const char *path, int flags), (folder, path, flags))
AT_PATH(rmdir, AT_FDCWD, (const char *path), (path))
AT_PATH(mkdir, AT_FDCWD, (const char *path, mode_t mode), (path, mode))
AT_PATH(mkdirat, folder, (int folder, const char *path, mode_t mode), (folder, path, mode))

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC)) AT(at_path("open", AT_FDCWD, path)); \
        return real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        if (flags & (O_CREAT | O_TRUNC)) AT(at_path("open", folder, path)); \
        return real(folder, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

static int at_fork(void) {
    return armed_process != 0 && getpid() == armed_process && point("fork", "");
}
pid_t fork(void) { REAL(fork); if (at_fork()) die(); return real(); }
/* A vfork cannot be wrapped, since its child must not return from here; a fork does the same, more slowly. */
pid_t vfork(void) { return fork(); }
