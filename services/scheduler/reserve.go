package scheduler

import (
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// slot is where at most one reservation may be: a pool and a model ("" for runs without devices).
type slot struct{ pool, model string }

// reservation keeps room on a host for a run that has waited long.
type reservation struct {
	run     fleet.RunKey
	user    string // name of the run's owner
	host    *host
	model   *model // nil for a run without devices
	count   int
	devices []fleet.DeviceID // free ones, up to count
	want    sizes
	since   time.Time
}

// keepReservations takes up those of the last pass that still make sense, before anybody is tried: devices that became free on their
// hosts are theirs.
func (p *pass) keepReservations(last []fleet.Reservation) {
	if len(last) == 0 {
		return
	}
	by := make(map[fleet.RunKey]fleet.Reservation, len(last))
	for _, l := range last {
		by[l.Run] = l
	}
	for i := range p.queue {
		e := &p.queue[i]
		l, ok := by[e.Run]
		if !ok || e.decided || e.KeepHost != "" || !e.eligible() || !p.waitedLong(e) {
			continue
		}
		h := p.byID[l.Host]
		if h == nil || h.claim != nil {
			continue
		}
		if m, _, ok := p.canReserve(e.Request, p.shapeOf(e), h, l.Devices); ok {
			p.reserve(e.Request, h, m, l.Since)
		}
	}
}

func (p *pass) waitedLong(e *entry) bool {
	return !e.SubmittedAt.IsZero() && p.now.Sub(e.SubmittedAt) >= p.set.ReserveAfter
}

// wantReservation makes or betters the reservation of a run that could not be placed.
func (p *pass) wantReservation(e *entry, sh *shape) {
	r := e.Request
	if sh.lost || !p.waitedLong(e) {
		return
	}
	own := p.reserved[r.Run]
	if own == nil && (sh.noReserve || p.slotsTaken(r, sh)) {
		return
	}
	best, bestModel, fewest := p.bestToReserve(r, sh, own)
	if best == nil || (fewest > 0 && r.Spec.GPU.Count == 1) { // the next free device is its own anyway: nobody who came later is asked before it
		sh.noReserve = own == nil
		return
	}
	since := p.now
	if own != nil {
		if fewest >= own.count-len(own.devices) {
			return
		}
		since = own.since
		p.drop(own)
	}
	p.reserve(r, best, bestModel, since)
}

// bestToReserve is the host, other than that of the run's own reservation, with the fewest devices missing; nil where none could ever do.
func (p *pass) bestToReserve(r *fleet.Request, sh *shape, own *reservation) (best *host, m *model, missing int) {
	for _, h := range sh.pool.hosts {
		if own != nil && own.host == h {
			continue
		}
		if with, lacks, ok := p.canReserve(r, sh, h, nil); ok && (best == nil || lacks < missing) {
			best, m, missing = h, with, lacks
		}
	}
	return best, m, missing
}

// slotsTaken reports whether others hold all reservations that a shape could have.
func (p *pass) slotsTaken(r *fleet.Request, sh *shape) bool {
	if r.Spec.GPU.Count == 0 {
		return !p.slotFree(r, slot{sh.pool.name, ""})
	}
	for _, m := range sh.models {
		if p.slotFree(r, slot{sh.pool.name, m.name}) {
			return false
		}
	}
	return true
}

// canReserve reports whether a host could hold the run if it were empty, with which model, and how many devices are missing now.
// Devices that it kept in the last pass say which model it was.
func (p *pass) canReserve(r *fleet.Request, sh *shape, h *host, kept []fleet.DeviceID) (m *model, missing int, ok bool) {
	count := r.Spec.GPU.Count
	if !p.unclaimed(h, sh) || !h.everHolds(p.sizes(r, h), count) {
		return nil, 0, false
	}
	if count == 0 {
		return nil, 0, p.slotFree(r, slot{sh.pool.name, ""})
	}
	for _, candidate := range sh.models {
		st := h.stock(candidate.name)
		if st == nil || st.leasable < count || !p.slotFree(r, slot{sh.pool.name, candidate.name}) || !sh.require.holds(h.facts(candidate.name)) {
			continue
		}
		lacks := max(0, count-len(st.free))
		if m == nil || lacks < missing || slices.ContainsFunc(kept, func(d fleet.DeviceID) bool { return h.modelOf(d) == candidate.name }) {
			m, missing = candidate, lacks
		}
	}
	return m, missing, m != nil
}

// unclaimed reports whether a host takes runs of a shape and is kept for nobody.
func (p *pass) unclaimed(h *host, sh *shape) bool {
	return h.view.Usable && h.pool == sh.pool && h.claim == nil && !p.diskFull(h) && (sh.pinned == nil || sh.pinned == h)
}

// slotFree reports whether the run may use a slot: nobody has it, or it has it itself.
func (p *pass) slotFree(r *fleet.Request, s slot) bool {
	owner := p.slots[s]
	return owner == nil || owner.run == r.Run
}

// everHolds reports whether the host's CPU and memory would do if it were empty.
func (h *host) everHolds(want sizes, count int) bool {
	all := h.total(count)
	return want.cpu <= all.cpu && want.memory <= all.memory
}

func (h *host) modelOf(id fleet.DeviceID) string {
	for i := range h.view.Devices {
		if h.view.Devices[i].ID == id {
			return h.view.Devices[i].Model
		}
	}
	return ""
}

// reserve takes a host's free devices of a model out of everybody else's reach.
func (p *pass) reserve(r *fleet.Request, h *host, m *model, since time.Time) {
	res := &reservation{run: r.Run, user: r.UserName, host: h, model: m, count: r.Spec.GPU.Count, want: p.sizes(r, h), since: since}
	key := slot{pool: h.pool.name}
	if m != nil {
		key.model = m.name
		st := h.stock(m.name)
		before := len(st.free)
		n := min(res.count, before)
		res.devices = slices.Clone(st.free[:n])
		st.free = st.free[n:]
		m.move(h, before, len(st.free))
	}
	h.claim = res
	p.reserved[r.Run] = res
	p.slots[key] = res
}

// drop gives a reservation's devices back.
func (p *pass) drop(res *reservation) {
	key := slot{pool: res.host.pool.name}
	if res.model != nil {
		key.model = res.model.name
		st := res.host.stock(res.model.name)
		before := len(st.free)
		st.free = append(slices.Clone(res.devices), st.free...)
		slices.Sort(st.free)
		res.model.move(res.host, before, len(st.free))
	}
	res.host.claim = nil
	delete(p.reserved, res.run)
	delete(p.slots, key)
	p.again = true
	for _, sh := range p.shapes { // room has grown: what failed may fit now
		sh.full, sh.noReserve, sh.next = false, false, 0
	}
}

// placeReserved puts a run onto what is kept for it, when that is enough by now.
func (p *pass) placeReserved(e *entry, res *reservation) bool {
	if len(res.devices) < res.count {
		return false
	}
	h := res.host
	h.claim = nil
	if h.short(res.want, res.count) != "" {
		h.claim = res
		return false
	}
	devices := res.devices
	res.devices = nil
	key := slot{pool: h.pool.name}
	if res.model != nil {
		key.model = res.model.name
	}
	delete(p.reserved, res.run)
	delete(p.slots, key)
	h.note(devices, e.Request)
	h.use(res.want, res.count)
	p.add(e, h, devices, res.want)
	return true
}

// listReservations writes the pass's reservations into the plan, by run.
func (p *pass) listReservations() {
	for _, h := range p.hosts {
		if res := h.claim; res != nil {
			p.plan.Reservations = append(p.plan.Reservations, fleet.Reservation{Run: res.run, Host: h.view.ID, Devices: res.devices, Since: res.since})
		}
	}
}
