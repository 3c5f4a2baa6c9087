/* The canary's two threads without the interpreter: nothing that holds Python up can delay or mislead them.
 *
 * The prober asks every `period` and notes the answer; the watchdog looks every `tick` and ends the process when a
 * probe is out for `deadline`. What it has to say is written to a descriptor first, for `grace` at most. Times are
 * nanoseconds. One canary a process. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef int64_t nanoseconds;
typedef int (*probe_function)(double seconds[2]);
enum { WORD = 16, SECOND = 1000000000, LONGEST = 1000000000 /* seconds that a probe may tell of */ };

typedef struct {
    char phase[WORD];
    nanoseconds scheduled, completed;
} sample;

static struct {
    pthread_mutex_t lock;
    pthread_t prober, watchdog;
    probe_function function; /* or, when NULL, a process that answers lines: */
    int ask, answer;
    int log, status;
    nanoseconds period, tick, deadline, grace;
    char name[WORD], phase[WORD], sent_phase[WORD];
    nanoseconds sent; /* when the probe that is out was sent; 0 for none */
    int running, stopping, probing;
    sample *samples;
    size_t count, room;
} canary = {.lock = PTHREAD_MUTEX_INITIALIZER};

static nanoseconds now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (nanoseconds)t.tv_sec * SECOND + t.tv_nsec;
}

static void pause_for(nanoseconds time) {
    const struct timespec t = {time / SECOND, time % SECOND};
    nanosleep(&t, NULL);
}

static void *leave_later(void *unused) {
    pause_for(canary.grace);
    _exit(canary.status);
    return unused;
}

/* -- what is said at the end: JSON lines, numbers without the locale ----------------------------------------------- */

typedef struct {
    char *text;
    size_t length, room;
} buffer;

__attribute__((format(printf, 2, 3))) static void put(buffer *out, const char *format, ...) {
    char piece[256];
    va_list words;
    va_start(words, format);
    const int length = vsnprintf(piece, sizeof piece, format, words);
    va_end(words);
    if (length < 0 || (size_t)length >= sizeof piece) return;
    if (out->length + (size_t)length > out->room) {
        const size_t room = 2 * out->room + sizeof piece;
        char *grown = realloc(out->text, room);
        if (grown == NULL) return;
        out->text = grown, out->room = room;
    }
    memcpy(out->text + out->length, piece, (size_t)length);
    out->length += (size_t)length;
}

static void put_time(buffer *out, const char *name, nanoseconds time, nanoseconds unit) {
    const nanoseconds size = time < 0 ? -time : time;
    const int digits = unit == SECOND ? 9 : 6;
    put(out, "\"%s\": %s%lld.%0*lld", name, time < 0 ? "-" : "", (long long)(size / unit), digits,
        (long long)(size % unit));
}

static void put_sample(buffer *out, const sample *s) {
    put(out, "{\"phase\": \"%s\", ", s->phase);
    put_time(out, "scheduled_ms", s->scheduled, SECOND / 1000);
    put(out, ", ");
    put_time(out, "completed_ms", s->completed, SECOND / 1000);
    put(out, "}");
}

/* Called with the lock held, which is kept: nobody adds to the samples any more. */
static void leave(buffer *out) {
    pthread_t exit_thread;
    const int guarded = pthread_create(&exit_thread, NULL, leave_later, NULL) == 0;
    put(out, "{\"event\": \"reference_canary_summary\", \"enabled\": true, \"probe\": \"%s\", "
        "\"threads\": \"compiled\", \"samples\": [",
        canary.name);
    for (size_t i = 0; i < canary.count; i++) {
        if (i > 0) put(out, ", ");
        put_sample(out, &canary.samples[i]);
    }
    put(out, "], \"incomplete\": true}\n");
    /* From here on others write to nowhere, so that their lines cannot stand within these. */
    const int log = dup(canary.log), nowhere = open("/dev/null", O_WRONLY);
    if (log >= 0 && nowhere >= 0) dup2(nowhere, canary.log);
    for (size_t done = 0; guarded && done < out->length;) {
        const ssize_t wrote = write(log, out->text + done, out->length - done);
        if (wrote < 0 && errno != EINTR) break;
        if (wrote > 0) done += (size_t)wrote;
    }
    _exit(canary.status);
}

static void leave_pending(nanoseconds pending) {
    buffer out = {0};
    put(&out, "\n{\"event\": \"test_canary_abort\", \"phase\": \"%s\", \"sent_in\": \"%s\", ", canary.phase,
        canary.sent_phase);
    put_time(&out, "pending_seconds", pending, SECOND);
    put(&out, ", \"reason\": \"a probe is out for %lld.%lld s\"}\n", (long long)(canary.deadline / SECOND),
        (long long)(canary.deadline % SECOND / (SECOND / 10)));
    leave(&out);
}

static void leave_with(const sample *s, int ok) {
    buffer out = {0};
    put(&out, "\n{\"event\": \"test_canary_abort\", \"ok\": %s, \"sample\": ", ok ? "true" : "false");
    put_sample(&out, s);
    put(&out, "}\n");
    leave(&out);
}

/* -- the two threads ----------------------------------------------------------------------------------------------- */

/* One line to the process behind `ask`, and its answer: two whole numbers of nanoseconds. */
static int ask_process(nanoseconds times[2]) {
    char line[64];
    size_t length = 0;
    ssize_t got;
    while ((got = write(canary.ask, "\n", 1)) < 0 && errno == EINTR) continue;
    if (got != 1) return 0;
    while (length + 1 < sizeof line) {
        got = read(canary.answer, line + length, 1);
        if (got < 0 && errno == EINTR) continue;
        if (got != 1) return 0;
        if (line[length] == '\n') break;
        length++;
    }
    line[length] = '\0';
    long long scheduled, completed;
    if (sscanf(line, "%lld %lld", &scheduled, &completed) != 2) return 0;
    times[0] = scheduled, times[1] = completed;
    return 1;
}

static int ask_probe(nanoseconds times[2]) {
    if (canary.function == NULL) return ask_process(times);
    double seconds[2] = {0.0, 0.0};
    const int ok = canary.function(seconds) == 1;
    for (int i = 0; i < 2; i++) {
        if (!(seconds[i] >= 0.0 && seconds[i] < LONGEST)) return 0; /* NaN is neither */
        times[i] = (nanoseconds)(seconds[i] * SECOND);
    }
    return ok;
}

static int is_stopping(void) {
    pthread_mutex_lock(&canary.lock);
    const int stopping = canary.stopping;
    pthread_mutex_unlock(&canary.lock);
    return stopping;
}

static void note(const sample *s) {
    if (canary.count == canary.room) {
        const size_t room = canary.room > 0 ? 2 * canary.room : 256;
        sample *grown = realloc(canary.samples, room * sizeof *grown);
        if (grown == NULL) return;
        canary.samples = grown, canary.room = room;
    }
    canary.samples[canary.count++] = *s;
}

static void *probe_on(void *unused) {
    while (!is_stopping()) {
        nanoseconds times[2] = {0, 0};
        sample s;
        pthread_mutex_lock(&canary.lock);
        const nanoseconds sent = canary.sent = now();
        memcpy(canary.sent_phase, canary.phase, WORD);
        pthread_mutex_unlock(&canary.lock);
        const int ok = ask_probe(times);
        pthread_mutex_lock(&canary.lock);
        canary.sent = 0;
        memcpy(s.phase, canary.sent_phase, WORD);
        s.scheduled = times[0], s.completed = times[1];
        const int counts = ok || !canary.stopping; /* one that is closed under it does not */
        if (counts) note(&s);
        if (counts && (!ok || s.completed >= canary.deadline)) leave_with(&s, ok);
        pthread_mutex_unlock(&canary.lock);
        while (!is_stopping() && now() - sent < canary.period) {
            const nanoseconds left = canary.period - (now() - sent);
            pause_for(left < canary.tick ? (left > 0 ? left : 0) : canary.tick);
        }
    }
    pthread_mutex_lock(&canary.lock);
    canary.probing = 0;
    pthread_mutex_unlock(&canary.lock);
    return unused;
}

static void *watch_on(void *unused) {
    for (int stopping = 0; !stopping; pause_for(canary.tick)) {
        pthread_mutex_lock(&canary.lock);
        stopping = canary.stopping;
        const nanoseconds pending = canary.sent == 0 ? 0 : now() - canary.sent;
        if (!stopping && pending >= canary.deadline) leave_pending(pending);
        pthread_mutex_unlock(&canary.lock);
    }
    return unused;
}

/* -- Python -------------------------------------------------------------------------------------------------------- */

static void take_word(char *to, const char *word) { snprintf(to, WORD, "%s", word); }

static PyObject *start(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long function;
    int ask, answer, log, status;
    double period, tick, deadline, grace;
    const char *name, *phase;
    if (!PyArg_ParseTuple(args, "Kiiiiddddss", &function, &ask, &answer, &log, &status, &period, &tick, &deadline,
                          &grace, &name, &phase))
        return NULL;
    if (canary.running) {
        PyErr_SetString(PyExc_RuntimeError, "a canary is running in this process");
        return NULL;
    }
    canary.function = (probe_function)(uintptr_t)function;
    canary.ask = ask, canary.answer = answer, canary.log = log, canary.status = status;
    canary.period = (nanoseconds)(period * SECOND), canary.tick = (nanoseconds)(tick * SECOND);
    canary.deadline = (nanoseconds)(deadline * SECOND), canary.grace = (nanoseconds)(grace * SECOND);
    take_word(canary.name, name), take_word(canary.phase, phase);
    canary.sent = 0, canary.count = 0, canary.stopping = 0, canary.probing = 1;
    if (pthread_create(&canary.prober, NULL, probe_on, NULL) != 0) return PyErr_NoMemory();
    if (pthread_create(&canary.watchdog, NULL, watch_on, NULL) != 0) {
        pthread_mutex_lock(&canary.lock);
        canary.stopping = 1;
        pthread_mutex_unlock(&canary.lock);
        pthread_join(canary.prober, NULL);
        return PyErr_NoMemory();
    }
    canary.running = 1;
    Py_RETURN_NONE;
}

static PyObject *enter(PyObject *self, PyObject *args) {
    (void)self;
    const char *phase;
    if (!PyArg_ParseTuple(args, "s", &phase)) return NULL;
    pthread_mutex_lock(&canary.lock);
    take_word(canary.phase, phase);
    pthread_mutex_unlock(&canary.lock);
    Py_RETURN_NONE;
}

static PyObject *listed(void) {
    PyObject *list = PyList_New((Py_ssize_t)canary.count);
    for (size_t i = 0; list != NULL && i < canary.count; i++) {
        const sample *s = &canary.samples[i];
        PyObject *item = Py_BuildValue("(sLL)", s->phase, (long long)s->scheduled, (long long)s->completed);
        if (item == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

static PyObject *stop(PyObject *self, PyObject *args) {
    (void)self;
    double seconds;
    if (!PyArg_ParseTuple(args, "d", &seconds)) return NULL;
    if (!canary.running) {
        PyErr_SetString(PyExc_RuntimeError, "no canary is running");
        return NULL;
    }
    int probing = 1;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&canary.lock);
    canary.stopping = 1;
    pthread_mutex_unlock(&canary.lock);
    pthread_join(canary.watchdog, NULL);
    const nanoseconds until = now() + (nanoseconds)(seconds * SECOND);
    while (probing) {
        pthread_mutex_lock(&canary.lock);
        probing = canary.probing;
        pthread_mutex_unlock(&canary.lock);
        if (!probing || now() >= until) break;
        pause_for(canary.tick);
    }
    if (!probing) pthread_join(canary.prober, NULL);
    Py_END_ALLOW_THREADS
    canary.running = probing;
    PyObject *samples = listed();
    return samples == NULL ? NULL : Py_BuildValue("(NO)", samples, probing ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"start", start, METH_VARARGS,
     "start(function, ask, answer, log, status, period, tick, deadline, grace, name, phase): begin. `function` is an "
     "address, or 0 for a process behind two descriptors; times are seconds."},
    {"enter", enter, METH_VARARGS, "enter(phase): what the engine does from now on."},
    {"stop", stop, METH_VARARGS,
     "stop(seconds): samples as (phase, scheduled, completed) in nanoseconds, and whether a probe is still out."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_watchdog", "The canary without the interpreter.", -1,
                                    methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__watchdog(void) { return PyModule_Create(&module); }
