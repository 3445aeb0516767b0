package scheduler

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Feasible says whether a request could ever start as things are, before it is queued: nil, or an error that names the limit or the
// largest possible. A host that is merely away, or has not told yet what it has, does not make a request infeasible.
// KindInvalid: no such model; KindExhausted: more than the user's limit or than any host has; KindConflict: no host at all.
func Feasible(snapshot fleet.Snapshot, r fleet.Request, settings Settings) error {
	s := newState(snapshot, settings.withDefaults())
	if count := r.Spec.GPU.Count; count > 0 && r.GPULimit >= 0 && count > r.GPULimit {
		return fleet.Errorf(fleet.KindExhausted, "%s are more than your limit of %d at once (%d in use); ask for fewer, or an admin to raise it",
			gpus(count, nil), r.GPULimit, snapshot.Held[r.User])
	}
	return s.feasible(&r, s.newShape(&r), asItIs)
}

// outlook says which devices count when it is asked what could ever be.
type outlook int

const (
	asItIs outlook = iota // those that could be leased; on hosts that are away, all
	atBest                // all, also failed ones, which may come back
)

// impossible is Feasible for a queued request, judged leniently and once per shape: what may come back is waited for.
func (p *pass) impossible(r *fleet.Request, sh *shape) error {
	if !sh.checked {
		sh.checked = true
		if len(sh.pool.hosts) > 0 {
			sh.never = p.feasible(r, sh, atBest)
		}
	}
	return sh.never
}

func (s *state) feasible(r *fleet.Request, sh *shape, look outlook) error {
	if sh.lost {
		return fleet.Errorf(fleet.KindConflict, "%s", lostText(r, sh))
	}
	hosts := sh.pool.hosts
	if sh.pinned != nil {
		hosts = []*host{sh.pinned}
	}
	if len(hosts) == 0 {
		return fleet.Errorf(fleet.KindConflict, "pool %s has no hosts; an admin adds one with `carrel host token`", sh.pool.name)
	}
	for _, h := range hosts {
		if h.unknown() {
			return nil
		}
	}
	hosts, err := s.withDevices(r, sh, hosts, look)
	if err != nil {
		return err
	}
	if err := s.withRoom(r, sh, hosts); err != nil {
		return err
	}
	return s.withDriver(r, sh, hosts)
}

// withDevices returns the hosts that have enough devices of one model.
func (s *state) withDevices(r *fleet.Request, sh *shape, hosts []*host, look outlook) ([]*host, error) {
	count := r.Spec.GPU.Count
	if count == 0 {
		return hosts, nil
	}
	if len(sh.models) == 0 {
		return nil, noModel(r, sh)
	}
	var out []*host
	most, mostModel, mostHost := 0, "", ""
	for _, h := range hosts {
		enough := false
		for _, m := range sh.models {
			n := h.capacity(m.name, look)
			enough = enough || n >= count
			if n > most {
				most, mostModel, mostHost = n, m.name, h.view.Name
			}
		}
		if enough {
			out = append(out, h)
		}
	}
	if len(out) > 0 {
		return out, nil
	}
	where := "pool " + sh.pool.name
	if sh.pinned != nil {
		where = sh.pinned.view.Name + " (" + strings.TrimSuffix(pinText(r, sh.pinned), ": ") + ")"
	}
	if most == 0 {
		return nil, fleet.Errorf(fleet.KindExhausted, "no %s of %s can be leased now%s; see `carrel gpus`", gpuWord(1, r.Spec.GPU.Models), where, firstFault(hosts, sh))
	}
	return nil, fleet.Errorf(fleet.KindExhausted, "%s on one host are more than %s has: the largest possible is %d (%s on %s)%s",
		gpus(count, r.Spec.GPU.Models), where, most, mostModel, mostHost, firstFault(hosts, sh))
}

// capacity is how many devices of a model could be leased together if nobody held one.
func (h *host) capacity(model string, look outlook) int {
	st := h.stock(model)
	switch {
	case st == nil:
		return 0
	case look == atBest || !h.view.Usable:
		return st.total
	}
	return st.leasable
}

func firstFault(hosts []*host, sh *shape) string {
	for _, h := range hosts {
		for i := range h.view.Devices {
			if d := &h.view.Devices[i]; h.view.Usable && !d.Leasable && sh.wants(d.Model) {
				return fmt.Sprintf("; %s on %s: %s", d.ID, h.view.Name, d.Why)
			}
		}
	}
	return ""
}

func noModel(r *fleet.Request, sh *shape) error {
	if len(sh.pool.models) == 0 {
		return fleet.Errorf(fleet.KindExhausted, "pool %s has no GPUs; ask for `--gpu 0`, or choose another pool", sh.pool.name)
	}
	var have []string
	for _, m := range sh.pool.models {
		have = append(have, fmt.Sprintf("%s (%d)", m.name, m.total))
	}
	return fleet.Errorf(fleet.KindInvalid, "pool %s has no GPU of model %s; it has %s", sh.pool.name, strings.Join(r.Spec.GPU.Models, " or "), strings.Join(have, ", "))
}

// withRoom checks CPU and memory against hosts as if they were empty.
func (s *state) withRoom(r *fleet.Request, sh *shape, hosts []*host) error {
	var most room
	var cpuOn, memoryOn string
	for _, h := range hosts {
		if h.everHolds(s.sizes(r, h), r.Spec.GPU.Count) {
			return nil
		}
		all := h.total(r.Spec.GPU.Count)
		if all.cpu > most.cpu || cpuOn == "" {
			most.cpu, cpuOn = all.cpu, h.view.Name
		}
		if all.memory > most.memory || memoryOn == "" {
			most.memory, memoryOn = all.memory, h.view.Name
		}
	}
	what := ""
	if r.Spec.GPU.Count == 0 {
		what = " for a workspace without GPUs"
	}
	switch {
	case r.Spec.CPUMillis > most.cpu:
		return fleet.Errorf(fleet.KindExhausted, "%s cores are more than any host of pool %s offers%s: the largest possible is %s (%s)",
			cores(r.Spec.CPUMillis), sh.pool.name, what, cores(most.cpu), cpuOn)
	case r.Spec.MemoryMiB > most.memory:
		return fleet.Errorf(fleet.KindExhausted, "%s of memory are more than any host of pool %s offers%s: the largest possible is %s (%s)",
			gib(r.Spec.MemoryMiB), sh.pool.name, what, gib(most.memory), memoryOn)
	}
	return fleet.Errorf(fleet.KindExhausted, "no host of pool %s offers this much together%s: at most %s cores (%s) and %s of memory (%s)",
		sh.pool.name, what, cores(most.cpu), cpuOn, gib(most.memory), memoryOn)
}

// withDriver checks what the image asks of driver and devices.
func (s *state) withDriver(r *fleet.Request, sh *shape, hosts []*host) error {
	if r.Spec.GPU.Count == 0 || sh.require.empty() {
		return nil
	}
	var have []string
	for _, h := range hosts {
		for _, m := range sh.models {
			if h.capacity(m.name, atBest) >= r.Spec.GPU.Count && sh.require.holds(h.facts(m.name)) {
				return nil
			}
		}
		if len(have) < listed {
			have = append(have, fmt.Sprintf("%s has CUDA %s, driver %s", h.view.Name, cmp.Or(h.view.CUDAVersion, "unknown"), cmp.Or(h.view.DriverVersion, "unknown")))
		}
	}
	return fleet.Errorf(fleet.KindConflict, "no host of pool %s can run image %s: it needs %s; %s. Choose an image for an older CUDA, or update a host's driver",
		sh.pool.name, r.Spec.Image, sh.require.text, strings.Join(have, "; "))
}
