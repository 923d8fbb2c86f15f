/* The Python face: arguments in, buffers held, interpreter lock released around the work. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <math.h>

#include "bytes.h"
#include "engine.h"

/* Hold `object` as contiguous bytes. ValueError when it is not contiguous, BufferError when it is
 * read-only and must not be. 0 or -1. */
static int hold(PyObject *object, Py_buffer *view, int writable)
{
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES) < 0)
        return -1;
    if (!PyBuffer_IsContiguous(view, 'C')) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_ValueError, "the buffer is not contiguous");
        return -1;
    }
    if (writable && view->readonly) {
        PyBuffer_Release(view);
        PyErr_SetString(PyExc_BufferError, "the buffer is read-only");
        return -1;
    }
    return 0;
}

/* Work on less than this keeps the interpreter lock: while another thread wants it, giving it up costs
 * up to the switch interval of 5 ms. */
enum { LOCK_KEPT_BYTES = 64 << 10 };

static int hold_records(PyObject *object, Py_buffer *view, int writable, size_t record_bytes)
{
    if (hold(object, view, writable) < 0)
        return -1;
    if ((size_t)view->len % record_bytes == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "%zd bytes are not a whole number of records of %zu bytes",
                 view->len, record_bytes);
    PyBuffer_Release(view);
    return -1;
}

static PyObject *native_address_of(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "writable", NULL};
    PyObject *object;
    int writable = 0;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", names, &object, &writable) ||
        hold(object, &view, writable) < 0)
        return NULL;
    unsigned long long address = view.len ? (unsigned long long)(uintptr_t)view.buf : 0;
    Py_ssize_t nbytes = view.len;
    PyBuffer_Release(&view);
    return Py_BuildValue("Kn", address, nbytes);
}

static PyObject *native_checksum(PyObject *module, PyObject *object)
{
    Py_buffer view;
    (void)module;
    if (hold(object, &view, 0) < 0)
        return NULL;
    PyThreadState *state = view.len < LOCK_KEPT_BYTES ? NULL : PyEval_SaveThread();
    uint64_t sum = checksum64(view.buf, (size_t)view.len);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLongLong(sum);
}

static PyObject *native_transfer(PyObject *module, PyObject *args)
{
    PyObject *object;
    int threads = 1;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "O|i", &object, &threads) ||
        hold_records(object, &view, 1, sizeof(struct transfer_op)) < 0)
        return NULL;
    struct transfer_op *ops = view.buf;
    size_t count = (size_t)view.len / sizeof *ops;
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += ops[i].nbytes;
        if (ops[i].mode > TRANSFER_VERIFY) {
            PyErr_Format(PyExc_ValueError, "op %zu has mode %llu, which is none of 0, 1, 2", i,
                         (unsigned long long)ops[i].mode);
            PyBuffer_Release(&view);
            return NULL;
        }
    }
    PyThreadState *state = total < LOCK_KEPT_BYTES ? NULL : PyEval_SaveThread();
    transfer_run(ops, count, threads);
    if (state)
        PyEval_RestoreThread(state);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static int block_is_valid(const struct block *block)
{
    return block->chunk_bytes > 0 && 0 <= block->start && block->start <= block->stop &&
           block->stop <= block->payload_bytes;
}

/* Blocks of a call, the addresses of their records, and room for an operation on each. */
struct held_blocks {
    Py_buffer blocks, records;
    struct transfer_op *ops;
    size_t count;
    uint64_t total;
};

static void release_blocks(struct held_blocks *held)
{
    PyMem_Free(held->ops);
    PyBuffer_Release(&held->records);
    PyBuffer_Release(&held->blocks);
}

static int hold_blocks(PyObject *blocks, PyObject *records, struct held_blocks *held)
{
    *held = (struct held_blocks){0};
    if (hold_records(blocks, &held->blocks, 0, sizeof(struct block)) < 0)
        return -1;
    const struct block *rows = held->blocks.buf;
    held->count = (size_t)held->blocks.len / sizeof *rows;
    if (hold_records(records, &held->records, 0, sizeof(uint64_t)) < 0) {
        PyBuffer_Release(&held->blocks);
        return -1;
    }
    int valid = held->count == (size_t)held->records.len / sizeof(uint64_t);
    for (size_t i = 0; valid && i < held->count; i++) {
        valid = block_is_valid(&rows[i]);
        held->total += rows[i].stop - rows[i].start;
    }
    held->ops = PyMem_Malloc(held->count * sizeof *held->ops);
    if (valid && held->ops)
        return 0;
    if (valid)
        PyErr_NoMemory();
    else
        PyErr_SetString(PyExc_ValueError, "not one record for each block, or an invalid range");
    release_blocks(held);
    return -1;
}

static PyObject *native_copy_out(PyObject *module, PyObject *args)
{
    PyObject *blocks, *records, *result;
    int verify, threads = 1;
    struct held_blocks held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOp|i", &blocks, &records, &verify, &threads) ||
        hold_blocks(blocks, records, &held) < 0)
        return NULL;
    result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)held.count);
    if (result) {
        uint8_t *intact = (uint8_t *)PyBytes_AsString(result);
        PyThreadState *state = held.total < LOCK_KEPT_BYTES ? NULL : PyEval_SaveThread();
        copy_out_run(held.blocks.buf, held.records.buf, held.ops, intact, held.count, verify,
                     threads);
        if (state)
            PyEval_RestoreThread(state);
    }
    release_blocks(&held);
    return result;
}

static PyObject *native_copy_in(PyObject *module, PyObject *args)
{
    PyObject *blocks, *records;
    struct held_blocks held;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &blocks, &records) ||
        hold_blocks(blocks, records, &held) < 0)
        return NULL;
    PyThreadState *state = held.total < LOCK_KEPT_BYTES ? NULL : PyEval_SaveThread();
    copy_in_run(held.blocks.buf, held.records.buf, held.ops, held.count);
    if (state)
        PyEval_RestoreThread(state);
    release_blocks(&held);
    Py_RETURN_NONE;
}

static int pieces_fit(const struct strided *pieces, size_t count, uint64_t nbytes)
{
    uint64_t total = 0, n;
    for (size_t i = 0; i < count; i++)
        if (__builtin_mul_overflow(pieces[i].rows, pieces[i].row_bytes, &n) ||
            __builtin_add_overflow(total, n, &total))
            return 0;
    return total == nbytes;
}

static PyObject *strided_copy(PyObject *contiguous, PyObject *pieces_object, int gather)
{
    Py_buffer whole, pieces;
    PyObject *result = NULL;
    if (hold(contiguous, &whole, gather) < 0)
        return NULL;
    if (hold_records(pieces_object, &pieces, 0, sizeof(struct strided)) == 0) {
        size_t count = (size_t)pieces.len / sizeof(struct strided);
        int stream = whole.len >= STREAM_BATCH_BYTES;
        if (!pieces_fit(pieces.buf, count, (uint64_t)whole.len))
            PyErr_SetString(PyExc_ValueError, "the pieces do not add up to the buffer");
        else {
            Py_BEGIN_ALLOW_THREADS
            if (gather)
                gather_pieces(whole.buf, pieces.buf, count, stream);
            else
                scatter_pieces(pieces.buf, count, whole.buf, stream);
            Py_END_ALLOW_THREADS
            result = Py_NewRef(Py_None);
        }
        PyBuffer_Release(&pieces);
    }
    PyBuffer_Release(&whole);
    return result;
}

static PyObject *native_gather(PyObject *module, PyObject *args)
{
    PyObject *target, *pieces;
    (void)module;
    return PyArg_ParseTuple(args, "OO", &target, &pieces) ? strided_copy(target, pieces, 1) : NULL;
}

static PyObject *native_scatter(PyObject *module, PyObject *args)
{
    PyObject *pieces, *source;
    (void)module;
    return PyArg_ParseTuple(args, "OO", &pieces, &source) ? strided_copy(source, pieces, 0) : NULL;
}

/* The signature of cudaMemcpy2DAsync; 0 is success. */
typedef int (*copy_rectangle)(uintptr_t target, size_t target_pitch, uintptr_t source, size_t source_pitch,
                              size_t width, size_t height, int kind, uintptr_t stream);

static PyObject *native_copy_rectangles(PyObject *module, PyObject *args)
{
    unsigned long long function, stream;
    int kind, code = 0;
    PyObject *object;
    Py_buffer view;
    (void)module;
    if (!PyArg_ParseTuple(args, "KOiK", &function, &object, &kind, &stream) ||
        hold_records(object, &view, 0, sizeof(struct rectangle)) < 0)
        return NULL;
    const struct rectangle *each = view.buf;
    size_t count = (size_t)view.len / sizeof *each;
    copy_rectangle copy = (copy_rectangle)(uintptr_t)function;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < count && !code; i++)
        code = copy(each[i].target, each[i].target_pitch, each[i].source, each[i].source_pitch,
                    each[i].width, each[i].height, kind, stream);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromLong(code);
}

static PyObject *native_uring_available(PyObject *module, PyObject *unused)
{
    const char *reason;
    (void)module, (void)unused;
    int available = ring_available(&reason);
    return Py_BuildValue("Ns", PyBool_FromLong(available), reason);
}

static PyObject *native_select_simd(PyObject *module, PyObject *args)
{
    const char *name;
    (void)module;
    return PyArg_ParseTuple(args, "z", &name) ? PyBool_FromLong(simd_select(name) == 0) : NULL;
}

static PyObject *native_simd(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(simd_current()->name);
}

static PyTypeObject *pending_type;

typedef struct {
    PyObject_HEAD
    struct engine *engine;
    PyObject *kind;
} EngineObject;

/* `lane` is NULL once nothing is in flight. */
typedef struct {
    PyObject_HEAD
    EngineObject *owner;
    struct lane *lane;
    struct batch *batch;
    Py_buffer ops;
    int waiting;
} PendingObject;

static int deadline_after(double timeout_s, int64_t *deadline_ns)
{
    if (isnan(timeout_s) || timeout_s < 0) {
        PyErr_SetString(PyExc_ValueError, "timeout_s must be zero or more");
        return -1;
    }
    *deadline_ns = timeout_s > 1e9 ? NO_DEADLINE : clock_ns() + (int64_t)(timeout_s * 1e9);
    return 0;
}

static int check_process(const struct engine *engine)
{
    if (!engine_foreign(engine))
        return 0;
    PyErr_SetString(PyExc_RuntimeError, "the engine belongs to the parent process; open a new one");
    return -1;
}

static struct engine *usable_engine(PyObject *self)
{
    struct engine *engine = ((EngineObject *)self)->engine;
    if (check_process(engine) < 0)
        return NULL;
    if (engine_closed(engine)) {
        PyErr_SetString(PyExc_ValueError, "the engine is closed");
        return NULL;
    }
    return engine;
}

static PyObject *Engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", "depth", "threads", "split_bytes", NULL};
    const char *kind;
    int depth = 32, threads = 8;
    long long split_bytes = 512 << 10;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s|iiL", names, &kind, &depth, &threads, &split_bytes))
        return NULL;
    int uring = strcmp(kind, "uring") == 0;
    if (!uring && strcmp(kind, "threads"))
        return PyErr_Format(PyExc_ValueError, "unknown engine kind '%s': uring or threads", kind);
    if (depth < 1 || depth > 4096 || threads < 1 || threads > 1024)
        return PyErr_Format(PyExc_ValueError, "depth must be 1 to 4096 and threads 1 to 1024");
    if (split_bytes < 4096 || split_bytes % 4096 || split_bytes > 1 << 30)
        return PyErr_Format(PyExc_ValueError, "split_bytes must be a multiple of 4096 up to 1 GiB");
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    EngineObject *self = (EngineObject *)allocate(type, 0);
    if (!self)
        return NULL;
    self->kind = PyUnicode_FromString(kind);
    self->engine = engine_open(uring, (uint32_t)depth, (uint32_t)threads, (uint64_t)split_bytes);
    if (!self->engine) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void Engine_dealloc(PyObject *object)
{
    EngineObject *self = (EngineObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (self->engine && !engine_foreign(self->engine)) /* a child's copy may have a lock that is never released */
        engine_free(self->engine);
    Py_XDECREF(self->kind);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static int check_ops(const struct io_op *ops, size_t count)
{
    if (count > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many ops");
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        if (ops[i].opcode > OP_SYNC) {
            PyErr_Format(PyExc_ValueError, "op %zu has opcode %llu, which is none of 0, 1, 2", i,
                         (unsigned long long)ops[i].opcode);
            return -1;
        }
        if (ops[i].opcode == OP_READ && ops[i].table && !ops[i].chunk_bytes) {
            PyErr_Format(PyExc_ValueError, "op %zu has a table but chunk_bytes 0", i);
            return -1;
        }
    }
    return 0;
}

/* The object for unfinished ops of `run`. It owns the view, and the lane and batch unless they are
 * NULL. Out of memory, all three are leaked. */
static PyObject *make_pending(EngineObject *owner, struct lane *lane, struct batch *batch, Py_buffer *ops)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(pending_type, Py_tp_alloc);
    PendingObject *self = (PendingObject *)allocate(pending_type, 0);
    if (!self)
        return NULL;
    self->owner = (EngineObject *)Py_NewRef((PyObject *)owner);
    self->lane = lane;
    self->batch = batch;
    self->ops = *ops;
    return (PyObject *)self;
}

/* Without the interpreter lock. Returns batch_run's answer; *lane and *batch are NULL unless they are
 * still needed. */
static int run_batch(struct engine *engine, struct io_op *ops, size_t count, int64_t deadline_ns,
                     struct lane **lane, struct batch **batch)
{
    int error = 0;
    *batch = NULL;
    *lane = engine_borrow(engine, deadline_ns, &error);
    if (!*lane) {
        for (size_t i = 0; i < count; i++)
            ops[i].result = error == -ETIME ? -ETIMEDOUT : error;
        return error;
    }
    *batch = batch_open(*lane, ops, count, engine_split_bytes(engine));
    error = *batch ? batch_run(*batch, deadline_ns) : -ENOMEM;
    if (*batch && error && batch_in_flight(*batch) > 0)
        return error;
    if (*batch)
        batch_free(*batch);
    engine_return(engine, *lane);
    *lane = NULL;
    return error;
}

static PyObject *Engine_run(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ops", "timeout_s", NULL};
    PyObject *object;
    double timeout_s;
    int64_t deadline_ns;
    Py_buffer view;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Od", names, &object, &timeout_s) ||
        deadline_after(timeout_s, &deadline_ns) < 0)
        return NULL;
    struct engine *engine = usable_engine(self);
    if (!engine || hold_records(object, &view, 1, sizeof(struct io_op)) < 0)
        return NULL;
    struct io_op *ops = view.buf;
    size_t count = (size_t)view.len / sizeof *ops;
    if (check_ops(ops, count) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    struct lane *lane;
    struct batch *batch;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = run_batch(engine, ops, count, deadline_ns, &lane, &batch);
    Py_END_ALLOW_THREADS
    if (lane || error == -ETIME)
        return make_pending((EngineObject *)self, lane, batch, &view);
    PyBuffer_Release(&view);
    if (error) {
        errno = -error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

static PyObject *Engine_register(PyObject *self, PyObject *args)
{
    unsigned long long address, nbytes;
    struct engine *engine;
    int refused;
    if (!PyArg_ParseTuple(args, "KK", &address, &nbytes) || !(engine = usable_engine(self)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    refused = nbytes ? engine_register(engine, address, nbytes) : EINVAL;
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(!refused);
}

static PyObject *Engine_close(PyObject *self, PyObject *unused)
{
    struct engine *engine = ((EngineObject *)self)->engine;
    (void)unused;
    if (engine_foreign(engine))
        Py_RETURN_NONE;
    Py_BEGIN_ALLOW_THREADS
    engine_close(engine);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Engine_kind(PyObject *self, void *unused)
{
    (void)unused;
    return Py_NewRef(((EngineObject *)self)->kind);
}

static PyObject *Pending_wait(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"timeout_s", NULL};
    PendingObject *self = (PendingObject *)object;
    double timeout_s;
    int64_t deadline_ns;
    int drained;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "d", names, &timeout_s) ||
        deadline_after(timeout_s, &deadline_ns) < 0 || check_process(self->owner->engine) < 0)
        return NULL;
    if (!self->lane)
        Py_RETURN_TRUE;
    if (self->waiting) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is already waiting");
        return NULL;
    }
    self->waiting = 1;
    Py_BEGIN_ALLOW_THREADS
    drained = batch_drain(self->batch, deadline_ns);
    if (drained) {
        batch_free(self->batch);
        engine_return(self->owner->engine, self->lane);
    }
    Py_END_ALLOW_THREADS
    self->waiting = 0;
    if (drained)
        self->lane = NULL;
    return PyBool_FromLong(drained);
}

/* With I/O still in flight the lane and the ops are never released: a Pending dropped early is a leak,
 * never a write into freed memory of ours. */
static void Pending_dealloc(PyObject *object)
{
    PendingObject *self = (PendingObject *)object;
    PyTypeObject *type = Py_TYPE(object);
    if (!self->lane)
        PyBuffer_Release(&self->ops);
    Py_XDECREF((PyObject *)self->owner);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

#define KEYWORDS(f) ((PyCFunction)(void (*)(void))f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef engine_methods[] = {
    {"run", KEYWORDS(Engine_run), NULL},
    {"register", Engine_register, METH_VARARGS, NULL},
    {"close", Engine_close, METH_NOARGS, NULL},
    {0},
};
static PyGetSetDef engine_attributes[] = {{"kind", Engine_kind, NULL, NULL, NULL}, {0}};
static PyType_Slot engine_slots[] = {{Py_tp_new, Engine_new},
                                     {Py_tp_dealloc, Engine_dealloc},
                                     {Py_tp_methods, engine_methods},
                                     {Py_tp_getset, engine_attributes},
                                     {0, NULL}};
static PyType_Spec engine_spec = {"kvdepot.native._native.Engine", sizeof(EngineObject), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, engine_slots};

static PyMethodDef pending_methods[] = {{"wait", KEYWORDS(Pending_wait), NULL}, {0}};
static PyType_Slot pending_slots[] = {
    {Py_tp_dealloc, Pending_dealloc}, {Py_tp_methods, pending_methods}, {0, NULL}};
static PyType_Spec pending_spec = {
    "kvdepot.native._native.Pending", sizeof(PendingObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION, pending_slots};

static PyMethodDef functions[] = {
    {"address_of", KEYWORDS(native_address_of), NULL},
    {"checksum", native_checksum, METH_O, NULL},
    {"transfer", native_transfer, METH_VARARGS, NULL},
    {"copy_out", native_copy_out, METH_VARARGS, NULL},
    {"copy_in", native_copy_in, METH_VARARGS, NULL},
    {"gather", native_gather, METH_VARARGS, NULL},
    {"scatter", native_scatter, METH_VARARGS, NULL},
    {"copy_rectangles", native_copy_rectangles, METH_VARARGS, NULL},
    {"uring_available", native_uring_available, METH_NOARGS, NULL},
    {"select_simd", native_select_simd, METH_VARARGS, NULL},
    {"simd", native_simd, METH_NOARGS, NULL},
    {0},
};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "kvdepot.native._native",
                                        .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void)
{
    simd_select(NULL);
    PyObject *module = PyModule_Create(&definition);
    PyObject *engine_type = PyType_FromSpec(&engine_spec);
    pending_type = (PyTypeObject *)PyType_FromSpec(&pending_spec);
    if (module && engine_type && pending_type &&
        PyModule_AddObjectRef(module, "Engine", engine_type) == 0 &&
        PyModule_AddObjectRef(module, "Pending", (PyObject *)pending_type) == 0) {
        Py_DECREF(engine_type);
        return module;
    }
    Py_XDECREF(engine_type);
    Py_XDECREF(module);
    return NULL;
}
