package scheduler

import (
	"slices"
	"strings"

	"github.com/carrel-dev/carrel/services/fleet"
)

// shapeKey is all of a request that decides where it fits. Room only shrinks during a pass, so what failed once for a shape fails for
// every later request of it.
type shapeKey struct {
	pool, models        string
	count               int
	cpu, memory         int64
	require             string
	imageHost, homeHost fleet.HostID
	image, volume       string // where the reason names them: nobody is told of another's
}

// shape is what a pass has learnt about the requests of one key.
type shape struct {
	pool      *pool
	models    []*model // in the order to try
	pinned    *host    // the only host that will do; nil: any
	lost      bool     // pinned to a host that does not exist
	require   requirement
	full      bool // no place was found
	noReserve bool // no host can be reserved for it
	next      int  // CPU only: the first host that may still fit
	checked   bool // whether it can ever be met
	never     error
	why       string
}

func (p *pass) shapeOf(e *entry) *shape {
	if e.shape == nil {
		e.shape = p.findShape(e.Request)
	}
	return e.shape
}

func (p *pass) findShape(r *fleet.Request) *shape {
	key := shapeKey{
		pool: r.Spec.Pool, count: r.Spec.GPU.Count, cpu: r.Spec.CPUMillis, memory: r.Spec.MemoryMiB,
		require: r.Spec.RequireCUDA, imageHost: r.Spec.ImageHost, homeHost: r.HomeHost,
	}
	if r.Spec.GPU.Count > 0 {
		key.models = strings.Join(r.Spec.GPU.Models, "|")
	}
	if key.imageHost != "" || key.require != "" {
		key.image = r.Spec.Image
	}
	if key.homeHost != "" && !ownHome(r) {
		key.volume = r.HomeVolume
	}
	if sh := p.shapes[key]; sh != nil {
		return sh
	}
	sh := p.newShape(r)
	p.shapes[key] = sh
	return sh
}

func (s *state) newShape(r *fleet.Request) *shape {
	sh := &shape{pool: s.pools[r.Spec.Pool], require: parseRequirement(r.Spec.RequireCUDA)}
	if sh.pool == nil {
		sh.pool = &pool{name: r.Spec.Pool}
	}
	if r.Spec.GPU.Count > 0 {
		sh.models = sh.pool.wanted(r.Spec.GPU.Models)
	}
	for _, id := range []fleet.HostID{r.Spec.ImageHost, r.HomeHost} {
		if id == "" {
			continue
		}
		h := s.byID[id]
		if h == nil || h.pool != sh.pool || (sh.pinned != nil && sh.pinned != h) {
			sh.lost = true
		}
		sh.pinned = h
	}
	return sh
}

// wanted returns the models to try, in order.
func (p *pool) wanted(names []string) []*model {
	if len(names) == 0 {
		return p.models
	}
	var out []*model
	for _, name := range names {
		if m := p.byName[name]; m != nil && !slices.Contains(out, m) {
			out = append(out, m)
		}
	}
	return out
}

// find looks for the host and model that suit a request best; nil when there is none now.
func (p *pass) find(r *fleet.Request, sh *shape) (*host, *model) {
	switch {
	case sh.lost:
		return nil, nil
	case sh.pinned != nil:
		return p.findOn(sh.pinned, r, sh)
	case r.Spec.GPU.Count == 0:
		for ; sh.next < len(sh.pool.cpuOnly); sh.next++ {
			if h := sh.pool.cpuOnly[sh.next]; p.fits(r, sh, h, nil) {
				return h, nil
			}
		}
		return nil, nil
	}
	for _, m := range sh.models {
		if h := m.best(sh.pool, r.Spec.GPU.Count, func(h *host) bool { return p.fits(r, sh, h, m) }); h != nil {
			return h, m
		}
	}
	return nil, nil
}

// findOn looks at one host only.
func (p *pass) findOn(h *host, r *fleet.Request, sh *shape) (*host, *model) {
	if !h.view.Usable {
		return nil, nil
	}
	if r.Spec.GPU.Count == 0 {
		if p.fits(r, sh, h, nil) {
			return h, nil
		}
		return nil, nil
	}
	for _, m := range sh.models {
		if st := h.stock(m.name); st != nil && len(st.free) >= r.Spec.GPU.Count && p.fits(r, sh, h, m) {
			return h, m
		}
	}
	return nil, nil
}

// fits checks all but the number of devices: CPU, memory, disk and what the image asks of driver and device.
func (p *pass) fits(r *fleet.Request, sh *shape, h *host, m *model) bool {
	if p.diskFull(h) || h.short(p.sizes(r, h), r.Spec.GPU.Count) != "" {
		return false
	}
	return m == nil || sh.require.empty() || sh.require.holds(h.facts(m.name))
}

func (s *state) diskFull(h *host) bool {
	return h.view.DiskFreeMiB > 0 && h.view.DiskFreeMiB < s.set.MinDiskFreeMiB
}
