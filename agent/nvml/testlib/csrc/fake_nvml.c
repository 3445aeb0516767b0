// A libnvidia-ml.so.1 for tests: it answers from a scenario file. See testlib.go for the file's language.
//
// Structures and numbers are those of NVIDIA's nvml.h (CUDA 13), declared here as far as they are used. Every function
// reads the scenario anew where the file changed, so that a test changes the "hardware" while a program runs on it.

#define _GNU_SOURCE
#include <ctype.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_GPUS = 32, MAX_MIGS = 16, MAX_PROCS = 64, MAX_ERRS = 24, MAX_XIDS = 64, NAME = 96 };

typedef int ret_t;
enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, UNKNOWN = 999 };

typedef struct { char legacy[16]; unsigned domain, bus, device, id, sub; char bus_id[32]; } pci_t;
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned gpu, memory; } utilization_t;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process_t;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event_t;
typedef struct { unsigned id, scope; long long timestamp, latency; unsigned type, ret; unsigned long long value; } field_t;
typedef struct { unsigned sm, ce, dec, enc, jpeg, ofa, gi, ci; unsigned long long memory_mb; } attributes_t;

typedef struct { char what[24]; ret_t ret; } err_t;
typedef struct { unsigned pid; long long mib; } proc_t;
typedef struct {
	char uuid[NAME], profile[32];
	unsigned long long total, used;
	unsigned gi, ci;
	ret_t by_uuid;
	proc_t procs[MAX_PROCS];
	int nprocs;
} mig_t;
typedef struct {
	int present;
	char uuid[NAME], name[NAME], pci[32], hang[NAME];
	unsigned long long total, used;
	int cc_major, cc_minor, mig, mig_pending, util, power, temp, recovery;
	proc_t compute[MAX_PROCS], graphics[MAX_PROCS];
	int ncompute, ngraphics;
	mig_t migs[MAX_MIGS];
	int nmigs;
	err_t errs[MAX_ERRS];
	int nerrs;
} gpu_t;
typedef struct { int seq, gpu, xid; unsigned gi, ci; } xid_t;
typedef struct {
	char driver[NAME], hang[NAME];
	int cuda, order[MAX_GPUS], count;
	ret_t init;
	err_t errs[MAX_ERRS];
	int nerrs;
	gpu_t gpus[MAX_GPUS];
	xid_t xids[MAX_XIDS];
	int nxids;
} scenario_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static scenario_t now;
static int loaded, inits, last_seq;
static struct stat last_stat;
static char last_path[4096];

// A handle names a slot of the scenario, not an index, so it stays the same GPU when the order changes.
typedef struct { int gpu, mig; } handle_t;
static handle_t handles[MAX_GPUS][MAX_MIGS + 1];
static int event_set;

static const struct { const char *name; ret_t ret; } codes[] = {
	{"OK", 0}, {"UNINITIALIZED", 1}, {"INVALID_ARGUMENT", 2}, {"NOT_SUPPORTED", 3}, {"NO_PERMISSION", 4}, {"NOT_FOUND", 6},
	{"INSUFFICIENT_SIZE", 7}, {"DRIVER_NOT_LOADED", 9}, {"TIMEOUT", 10}, {"IRQ_ISSUE", 11}, {"FUNCTION_NOT_FOUND", 13},
	{"GPU_IS_LOST", 15}, {"RESET_REQUIRED", 16}, {"OPERATING_SYSTEM", 17}, {"LIB_RM_VERSION_MISMATCH", 18}, {"IN_USE", 19},
	{"MEMORY", 20}, {"NO_DATA", 21}, {"NOT_READY", 27}, {"GPU_NOT_FOUND", 28}, {"UNKNOWN", 999},
};

static ret_t code(const char *s) {
	for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
		if (!strcmp(codes[i].name, s)) return codes[i].ret;
	return UNKNOWN;
}

static void copy(char *to, const char *from, size_t n) { snprintf(to, n, "%s", from); }

static void default_gpu(scenario_t *s, int i) {
	gpu_t *g = &s->gpus[i];
	if (g->present) return;
	memset(g, 0, sizeof *g);
	g->present = 1;
	snprintf(g->uuid, NAME, "GPU-%08x-0000-4000-8000-%012x", i, i);
	copy(g->name, "NVIDIA GeForce RTX 4090", NAME);
	snprintf(g->pci, sizeof g->pci, "00000000:%02X:00.0", i + 1);
	g->total = 24564, g->used = 4, g->cc_major = 8, g->cc_minor = 9, g->mig = -1, g->mig_pending = -1;
	g->power = 20, g->temp = 35;
}

static int procs(proc_t *out, char *value) {
	int n = 0;
	for (char *save, *p = strtok_r(value, " ", &save); p && n < MAX_PROCS; p = strtok_r(NULL, " ", &save)) {
		out[n].mib = -1;
		if (sscanf(p, "%u:%lld", &out[n].pid, &out[n].mib) >= 1) n++;
	}
	return n;
}

static void add_err(err_t *errs, int *n, const char *what, const char *value) {
	if (*n == MAX_ERRS) return;
	copy(errs[*n].what, what, sizeof errs[0].what);
	errs[(*n)++].ret = code(value);
}

static void parse_mig(gpu_t *g, int i, char *value) {
	mig_t *m = &g->migs[i];
	if (i >= g->nmigs) g->nmigs = i + 1;
	m->gi = i + 1;
	int field = 0;
	for (char *save, *p = strtok_r(value, " ", &save); p; p = strtok_r(NULL, " ", &save), field++) {
		if (field == 0) copy(m->uuid, p, NAME);
		else if (field == 1) copy(m->profile, p, sizeof m->profile);
		else if (field == 2) m->total = strtoull(p, NULL, 10);
		else if (!strncmp(p, "used=", 5)) m->used = strtoull(p + 5, NULL, 10);
		else if (!strncmp(p, "gi=", 3)) m->gi = atoi(p + 3);
		else if (!strncmp(p, "ci=", 3)) m->ci = atoi(p + 3);
		else if (!strncmp(p, "by_uuid=", 8)) m->by_uuid = code(p + 8);
		else if (!strncmp(p, "compute=", 8)) {
			for (char *c = p + 8; *c; c++) if (*c == ',') *c = ' ';
			char list[512];
			copy(list, p + 8, sizeof list);
			m->nprocs = procs(m->procs, list);
		}
	}
}

static void parse_gpu(scenario_t *s, int i, const char *key, char *value) {
	default_gpu(s, i);
	gpu_t *g = &s->gpus[i];
	if (!strcmp(key, "uuid")) copy(g->uuid, value, NAME);
	else if (!strcmp(key, "name")) copy(g->name, value, NAME);
	else if (!strcmp(key, "pci")) copy(g->pci, value, sizeof g->pci);
	else if (!strcmp(key, "memory_total")) g->total = strtoull(value, NULL, 10);
	else if (!strcmp(key, "memory_used")) g->used = strtoull(value, NULL, 10);
	else if (!strcmp(key, "cc")) sscanf(value, "%d.%d", &g->cc_major, &g->cc_minor);
	else if (!strcmp(key, "mig")) g->mig = g->mig_pending = !strcmp(value, "on") ? 1 : !strcmp(value, "off") ? 0 : -1;
	else if (!strcmp(key, "mig_pending")) g->mig_pending = !strcmp(value, "on");
	else if (!strcmp(key, "util")) g->util = atoi(value);
	else if (!strcmp(key, "power")) g->power = atoi(value);
	else if (!strcmp(key, "temp")) g->temp = atoi(value);
	else if (!strcmp(key, "recovery")) g->recovery = atoi(value);
	else if (!strcmp(key, "compute")) g->ncompute = procs(g->compute, value);
	else if (!strcmp(key, "graphics")) g->ngraphics = procs(g->graphics, value);
	else if (!strcmp(key, "hang")) copy(g->hang, value, NAME);
	else if (!strncmp(key, "err.", 4)) add_err(g->errs, &g->nerrs, key + 4, value);
	else if (!strncmp(key, "mig", 3) && isdigit((unsigned char)key[3])) {
		int m = atoi(key + 3);
		if (m >= 0 && m < MAX_MIGS) parse_mig(g, m, value);
	}
}

static void parse_line(scenario_t *s, char *line, int *ordered) {
	char *eq = strchr(line, '=');
	if (line[0] == '#' || !eq) return;
	*eq = 0;
	char *value = eq + 1, *end = eq;
	while (end > line && isspace((unsigned char)end[-1])) *--end = 0;
	while (isspace((unsigned char)*value)) value++;
	for (end = value + strlen(value); end > value && isspace((unsigned char)end[-1]);) *--end = 0;
	int i, n;
	if (sscanf(line, "gpu%d.%n", &i, &n) == 1 && i >= 0 && i < MAX_GPUS) parse_gpu(s, i, line + n, value);
	else if (!strcmp(line, "driver")) copy(s->driver, value, NAME);
	else if (!strcmp(line, "cuda")) s->cuda = atoi(value);
	else if (!strcmp(line, "init")) s->init = code(value);
	else if (!strcmp(line, "hang")) copy(s->hang, value, NAME);
	else if (!strncmp(line, "err.", 4)) add_err(s->errs, &s->nerrs, line + 4, value);
	else if (!strcmp(line, "order")) {
		*ordered = 1, s->count = 0;
		for (char *save, *p = strtok_r(value, " ", &save); p && s->count < MAX_GPUS; p = strtok_r(NULL, " ", &save)) {
			i = atoi(p);
			if (i >= 0 && i < MAX_GPUS) default_gpu(s, i), s->order[s->count++] = i;
		}
	} else if (!strcmp(line, "xid") && s->nxids < MAX_XIDS) {
		xid_t *x = &s->xids[s->nxids];
		x->gi = x->ci = 0xFFFFFFFF;
		if (sscanf(value, "%d:%d:%d:%u:%u", &x->seq, &x->gpu, &x->xid, &x->gi, &x->ci) >= 3) s->nxids++;
	}
}

// refresh reads the scenario where it changed. The caller holds the lock.
static void refresh(void) {
	const char *path = getenv("CARREL_FAKE_NVML");
	struct stat st = {0};
	if (!path) path = "";
	int missing = stat(path, &st) != 0;
	if (loaded && !strcmp(path, last_path) && !memcmp(&st.st_mtim, &last_stat.st_mtim, sizeof st.st_mtim) &&
	    st.st_ino == last_stat.st_ino && st.st_size == last_stat.st_size)
		return;
	scenario_t *s = calloc(1, sizeof *s);
	if (!s) return;
	int ordered = 0;
	copy(s->driver, "550.54.15", NAME);
	s->cuda = 12040;
	FILE *f = missing ? NULL : fopen(path, "r");
	char line[2048];
	while (f && fgets(line, sizeof line, f)) parse_line(s, line, &ordered);
	if (f) fclose(f);
	if (!ordered) {
		for (int i = 0; i < MAX_GPUS; i++)
			if (s->gpus[i].present) s->order[s->count++] = i;
		for (int i = 0; i < 4 && !s->count; i++) default_gpu(s, i);
		if (!s->count)
			for (; s->count < 4; s->count++) s->order[s->count] = s->count;
	}
	for (int i = 0; i < MAX_GPUS; i++)
		for (int m = 0; m <= MAX_MIGS; m++) handles[i][m] = (handle_t){i, m - 1};
	if (strcmp(path, last_path)) last_seq = 0;
	now = *s;
	free(s);
	copy(last_path, path, sizeof last_path);
	last_stat = st, loaded = 1;
}

static int listed(const char *list, const char *what) {
	char copy_[NAME];
	copy(copy_, list, NAME);
	for (char *save, *p = strtok_r(copy_, " ", &save); p; p = strtok_r(NULL, " ", &save))
		if (!strcmp(p, what) || !strcmp(p, "all")) return 1;
	return 0;
}

static ret_t err_of(err_t *errs, int n, const char *what) {
	for (int i = 0; i < n; i++)
		if (!strcmp(errs[i].what, what) || !strcmp(errs[i].what, "all")) return errs[i].ret;
	return OK;
}

// enter takes the lock with a fresh scenario; it hangs without the lock for as long as the scenario says so. It returns
// the scenario's error for the call, if any; leave must follow in either case.
static ret_t enter(int gpu, const char *what) {
	for (;;) {
		pthread_mutex_lock(&lock);
		refresh();
		const char *list = gpu < 0 ? now.hang : now.gpus[gpu].hang;
		if (!listed(list, what)) break;
		pthread_mutex_unlock(&lock);
		nanosleep(&(struct timespec){0, 2000000}, NULL);
	}
	if (!inits && strcmp(what, "init")) return UNINITIALIZED;
	if (now.init && strcmp(what, "init")) return now.init; // the driver went away under a running program
	return gpu < 0 ? err_of(now.errs, now.nerrs, what) : err_of(now.gpus[gpu].errs, now.gpus[gpu].nerrs, what);
}

static ret_t leave(ret_t r) {
	pthread_mutex_unlock(&lock);
	return r;
}

// ASK begins a call on a device: h is its handle, g its GPU, m its MIG instance or NULL.
#define ASK(dev, what)                                             \
	handle_t *h = (handle_t *)(dev);                               \
	if (!h) return INVALID_ARGUMENT;                               \
	ret_t r = enter(h->gpu, what);                                 \
	gpu_t *g = &now.gpus[h->gpu];                                  \
	mig_t *m = h->mig >= 0 ? &g->migs[h->mig] : NULL;              \
	if (!r && m && (h->mig >= g->nmigs || g->mig != 1)) r = NOT_FOUND; \
	if (r) return leave(r);                                        \
	(void)m

EXPORT ret_t nvmlInit_v2(void) {
	ret_t r = enter(-1, "init");
	if (!r) r = now.init;
	if (!r) inits++;
	return leave(r);
}
EXPORT ret_t nvmlInit(void) { return nvmlInit_v2(); }
EXPORT ret_t nvmlShutdown(void) {
	pthread_mutex_lock(&lock);
	ret_t r = inits ? OK : UNINITIALIZED;
	if (inits) inits--;
	return leave(r);
}
EXPORT const char *nvmlErrorString(ret_t r) {
	for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
		if (codes[i].ret == r) return codes[i].name;
	return "Unknown Error";
}
EXPORT ret_t nvmlSystemGetDriverVersion(char *out, unsigned n) {
	ret_t r = enter(-1, "driver_version");
	if (!r) copy(out, now.driver, n);
	return leave(r);
}
EXPORT ret_t nvmlSystemGetNVMLVersion(char *out, unsigned n) {
	ret_t r = enter(-1, "nvml_version");
	if (!r) snprintf(out, n, "12.%s", now.driver);
	return leave(r);
}
EXPORT ret_t nvmlSystemGetCudaDriverVersion(int *out) {
	ret_t r = enter(-1, "cuda_version");
	if (!r) *out = now.cuda;
	return leave(r);
}
EXPORT ret_t nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }
EXPORT ret_t nvmlDeviceGetCount_v2(unsigned *out) {
	ret_t r = enter(-1, "count");
	if (!r) *out = now.count;
	return leave(r);
}
EXPORT ret_t nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }
EXPORT ret_t nvmlDeviceGetHandleByIndex_v2(unsigned i, void **out) {
	ret_t r = enter(-1, "handle");
	int slot = i < (unsigned)now.count ? now.order[i] : -1;
	leave(OK);
	if (r) return r;
	if (slot < 0) return INVALID_ARGUMENT;
	r = enter(slot, "handle");
	if (!r) *out = &handles[slot][0];
	return leave(r);
}
EXPORT ret_t nvmlDeviceGetHandleByIndex(unsigned i, void **out) { return nvmlDeviceGetHandleByIndex_v2(i, out); }
EXPORT ret_t nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
	ret_t r = enter(-1, "handle_by_uuid");
	if (r) return leave(r);
	r = NOT_FOUND;
	for (int i = 0; i < MAX_GPUS && r == NOT_FOUND; i++) {
		gpu_t *g = &now.gpus[i];
		if (!g->present) continue;
		if (!strcmp(g->uuid, uuid)) *out = &handles[i][0], r = OK;
		for (int j = 0; j < g->nmigs; j++)
			if (!strcmp(g->migs[j].uuid, uuid)) *out = &handles[i][j + 1], r = g->migs[j].by_uuid;
	}
	return leave(r);
}
EXPORT ret_t nvmlDeviceGetUUID(void *dev, char *out, unsigned n) {
	ASK(dev, "uuid");
	copy(out, m ? m->uuid : g->uuid, n);
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetName(void *dev, char *out, unsigned n) {
	ASK(dev, "name");
	if (m) snprintf(out, n, "%s MIG %s", g->name, m->profile);
	else copy(out, g->name, n);
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetMemoryInfo(void *dev, memory_t *out) {
	ASK(dev, "memory");
	unsigned long long total = m ? m->total : g->total, used = m ? m->used : g->used;
	*out = (memory_t){total << 20, (total - used) << 20, used << 20};
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetPciInfo_v3(void *dev, pci_t *out) {
	ASK(dev, "pci");
	memset(out, 0, sizeof *out);
	copy(out->bus_id, g->pci, sizeof out->bus_id);
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetPciInfo(void *dev, pci_t *out) { return nvmlDeviceGetPciInfo_v3(dev, out); }
EXPORT ret_t nvmlDeviceGetCudaComputeCapability(void *dev, int *major, int *minor) {
	ASK(dev, "cc");
	*major = g->cc_major, *minor = g->cc_minor;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetMigMode(void *dev, unsigned *current, unsigned *pending) {
	ASK(dev, "mig_mode");
	if (g->mig < 0) return leave(NOT_SUPPORTED);
	*current = g->mig, *pending = g->mig_pending;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetMaxMigDeviceCount(void *dev, unsigned *out) {
	ASK(dev, "mig_count");
	*out = g->mig < 0 ? 0 : 7;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetMigDeviceHandleByIndex(void *dev, unsigned i, void **out) {
	ASK(dev, "mig_handle");
	if (g->mig != 1 || i >= (unsigned)g->nmigs || !g->migs[i].uuid[0]) return leave(NOT_FOUND);
	*out = &handles[h->gpu][i + 1];
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *dev, void **out) {
	ASK(dev, "mig_parent");
	*out = &handles[h->gpu][0];
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetGpuInstanceId(void *dev, unsigned *out) {
	ASK(dev, "gi");
	if (!m) return leave(NOT_SUPPORTED);
	*out = m->gi;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetComputeInstanceId(void *dev, unsigned *out) {
	ASK(dev, "ci");
	if (!m) return leave(NOT_SUPPORTED);
	*out = m->ci;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetUtilizationRates(void *dev, utilization_t *out) {
	ASK(dev, "utilization");
	if (g->mig == 1) return leave(NOT_SUPPORTED);
	*out = (utilization_t){g->util, g->util / 2};
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetPowerUsage(void *dev, unsigned *out) {
	ASK(dev, "power");
	if (m) return leave(NOT_SUPPORTED);
	*out = g->power * 1000;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceGetTemperature(void *dev, int sensor, unsigned *out) {
	(void)sensor;
	ASK(dev, "temperature");
	if (m) return leave(NOT_SUPPORTED);
	*out = g->temp;
	return leave(OK);
}

static ret_t list(proc_t *from, int n, unsigned *count, process_t *out) {
	unsigned room = *count;
	*count = n;
	if (room < (unsigned)n) return INSUFFICIENT_SIZE;
	for (int i = 0; i < n; i++)
		out[i] = (process_t){from[i].pid, from[i].mib < 0 ? ~0ULL : (unsigned long long)from[i].mib << 20, 0xFFFFFFFF, 0xFFFFFFFF};
	return OK;
}
EXPORT ret_t nvmlDeviceGetComputeRunningProcesses_v3(void *dev, unsigned *count, process_t *out) {
	ASK(dev, "compute");
	return leave(m ? list(m->procs, m->nprocs, count, out) : list(g->compute, g->ncompute, count, out));
}
EXPORT ret_t nvmlDeviceGetGraphicsRunningProcesses_v3(void *dev, unsigned *count, process_t *out) {
	ASK(dev, "graphics");
	return leave(m ? list(NULL, 0, count, out) : list(g->graphics, g->ngraphics, count, out));
}
EXPORT ret_t nvmlDeviceGetFieldValues(void *dev, int n, field_t *values) {
	ASK(dev, "recovery");
	for (int i = 0; i < n; i++) {
		values[i].ret = values[i].id == 230 ? OK : NOT_SUPPORTED; // NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
		values[i].type = 1;                                       // unsigned int
		values[i].value = g->recovery;
	}
	return leave(OK);
}
EXPORT ret_t nvmlEventSetCreate(void **out) {
	ret_t r = enter(-1, "events");
	if (!r) *out = &event_set;
	return leave(r);
}
EXPORT ret_t nvmlEventSetFree(void *set) {
	(void)set;
	return OK;
}
EXPORT ret_t nvmlDeviceGetSupportedEventTypes(void *dev, unsigned long long *out) {
	ASK(dev, "events");
	*out = 8 | 2 | 1;
	return leave(OK);
}
EXPORT ret_t nvmlDeviceRegisterEvents(void *dev, unsigned long long types, void *set) {
	(void)types, (void)set;
	ASK(dev, "events");
	return leave(OK);
}
EXPORT ret_t nvmlEventSetWait_v2(void *set, event_t *out, unsigned timeout) {
	(void)set, (void)timeout;
	ret_t r = enter(-1, "event_wait");
	if (r) return leave(r);
	for (int i = 0; i < now.nxids; i++) {
		xid_t *x = &now.xids[i];
		if (x->seq <= last_seq || x->gpu < 0 || x->gpu >= MAX_GPUS) continue;
		last_seq = x->seq;
		*out = (event_t){&handles[x->gpu][0], 8, x->xid, x->gi, x->ci};
		return leave(OK);
	}
	return leave(TIMEOUT);
}
EXPORT ret_t nvmlEventSetWait(void *set, event_t *out, unsigned timeout) { return nvmlEventSetWait_v2(set, out, timeout); }
