package scheduler

import (
	"github.com/carrel-dev/carrel/services/fleet"
)

// Where a size came from when the workspace named none.
const (
	originShare   = "host share per device"
	originCPUOnly = "default without GPUs"
	originShm     = "half of the memory"
	originPids    = "default"
)

// sizes are what a run gets on a host besides devices.
type sizes struct{ cpu, memory, shm, pids int64 }

// sizes settles a run's sizes on a host.
func (s *state) sizes(r *fleet.Request, h *host) sizes {
	out := sizes{cpu: r.Spec.CPUMillis, memory: r.Spec.MemoryMiB, shm: r.Spec.ShmMiB, pids: r.Spec.PidsLimit}
	count := int64(r.Spec.GPU.Count)
	if out.cpu == 0 {
		out.cpu = s.defaultSize(count, h, h.view.CPUMillis, s.set.CPUOnlyMillis, h.view.CPUOnlyReserve)
	}
	if out.memory == 0 {
		out.memory = s.defaultSize(count, h, h.view.MemoryMiB, s.set.CPUOnlyMemoryMiB, h.view.MemOnlyReserve)
	}
	if out.shm == 0 {
		out.shm = out.memory / 2
	}
	if out.pids == 0 {
		out.pids = s.set.PidsLimit
	}
	return out
}

// cpuOnlyParts is into how many parts a host's room for runs without devices is divided at least, so that the first does not take it all.
const cpuOnlyParts = 4

// defaultSize is the share of count devices in what the host offers to runs with devices; without devices it is the setting, or a
// quarter of what the host keeps for such runs when that is less.
func (s *state) defaultSize(count int64, h *host, offered, cpuOnly, cpuOnlyTotal int64) int64 {
	if count == 0 {
		return max(1, min(cpuOnly, cpuOnlyTotal/cpuOnlyParts))
	}
	return max(1, offered/max(1, h.shares)*count)
}

// total is what the host offers to runs with devices, or to runs without, if nobody were on it.
func (h *host) total(count int) room {
	if count == 0 {
		return room{h.view.CPUOnlyReserve, h.view.MemOnlyReserve}
	}
	return room{h.view.CPUMillis, h.view.MemoryMiB}
}

// left is the CPU and memory that a run may still take. A reservation's part is not offered to others.
func (h *host) left(count int) room {
	out := h.free
	if count == 0 {
		out = h.cpuOnly
	}
	if h.claim != nil && (h.claim.count == 0) == (count == 0) {
		out.cpu -= h.claim.want.cpu
		out.memory -= h.claim.want.memory
	}
	return out
}

// short says what of CPU and memory is missing: "", "CPU" or "memory".
func (h *host) short(want sizes, count int) string {
	left := h.left(count)
	switch {
	case want.cpu > left.cpu:
		return "CPU"
	case want.memory > left.memory:
		return "memory"
	}
	return ""
}

// use takes CPU and memory.
func (h *host) use(want sizes, count int) {
	from := &h.free
	if count == 0 {
		from = &h.cpuOnly
	}
	from.cpu -= want.cpu
	from.memory -= want.memory
}

// origins says where the sizes came from that the workspace did not name. The maps are shared and only read.
func (p *pass) origins(r *fleet.Request) map[string]string {
	key := originKey{r.Spec.GPU.Count == 0, r.Spec.CPUMillis == 0, r.Spec.MemoryMiB == 0, r.Spec.ShmMiB == 0, r.Spec.PidsLimit == 0}
	if m := p.originMaps[key]; m != nil {
		return m
	}
	m := map[string]string{}
	share := originShare
	if key.cpuOnly {
		share = originCPUOnly
	}
	for field, from := range map[string]struct {
		unnamed bool
		text    string
	}{"cpu_millis": {key.cpu, share}, "memory_mib": {key.memory, share}, "shm_mib": {key.shm, originShm}, "pids_limit": {key.pids, originPids}} {
		if from.unnamed {
			m[field] = from.text
		}
	}
	if p.originMaps == nil {
		p.originMaps = map[originKey]map[string]string{}
	}
	p.originMaps[key] = m
	return m
}

// originKey says which sizes a request left open.
type originKey struct{ cpuOnly, cpu, memory, shm, pids bool }
