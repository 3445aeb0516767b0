// Package scheduler decides where waiting runs go: a snapshot and a time in, a plan with its reasons out, nothing read and nothing changed besides.
//
// Rules of a pass, in this order:
//
//  1. A restarted run that kept its devices goes back onto them, before anybody else's turn.
//  2. The others are tried in the order of their first submission; what does not fit now is passed over.
//  3. A run gets whole devices of one model on one host, on the host that has the fewest of them left over; equal hosts by name.
//     Models named in the request are tried in its order, "any model" from the smallest memory up.
//  4. A run that has waited for Settings.ReserveAfter and could go on if room were made gets a named reservation, one per pool and
//     model: the host where the fewest devices are missing, its free devices, and its CPU and memory. Nobody else may take them.
//     So a run waits at most ReserveAfter, then for those before it in the order, then for the longest run on the host kept for it.
package scheduler

import (
	"cmp"
	"slices"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// Settings are the figures that a pass rests on. The zero value of a field means its default.
type Settings struct {
	ReserveAfter     time.Duration // waiting time after which a run gets a reservation; default 10 min
	PidsLimit        int64         // most processes of a run that names no limit; default 4,096
	CPUOnlyMillis    int64         // CPU of a run without devices that names none, thousandths of a core; default 2,000
	CPUOnlyMemoryMiB int64         // memory of a run without devices that names none; default 4,096
	MinDiskFreeMiB   int64         // a host with less free is passed over (0 free means unknown); default 1,024
}

// withDefaults fills in the fields that are zero.
func (s Settings) withDefaults() Settings {
	s.ReserveAfter = cmp.Or(s.ReserveAfter, 10*time.Minute)
	s.PidsLimit = cmp.Or(s.PidsLimit, 4096)
	s.CPUOnlyMillis = cmp.Or(s.CPUOnlyMillis, 2000)
	s.CPUOnlyMemoryMiB = cmp.Or(s.CPUOnlyMemoryMiB, 4096)
	s.MinDiskFreeMiB = cmp.Or(s.MinDiskFreeMiB, 1024)
	return s
}

// Plan decides on every waiting run of a snapshot. Equal snapshots give equal plans, in whatever order their lists stand.
func Plan(snapshot fleet.Snapshot, settings Settings, now time.Time) fleet.Plan {
	s := newState(snapshot, settings.withDefaults())
	p := &pass{state: s, now: now, queue: inOrder(snapshot.Waiting), shapes: map[shapeKey]*shape{}}
	p.link(snapshot.Held)
	p.plan.Placements = make([]fleet.Placement, 0, min(len(p.queue), s.free+8))
	p.handOver()
	p.keepReservations(snapshot.Reservations)
	for p.again = true; p.again; {
		p.again = false // set when a reservation moved, so that those before it get a second look
		for i := range p.queue {
			if e := &p.queue[i]; !e.decided {
				p.try(e)
			}
		}
	}
	p.explain()
	p.listReservations()
	return p.plan
}

// entry is a request in the queue with what a pass looks up for it again and again.
type entry struct {
	*fleet.Request
	account *account
	line    *line
	shape   *shape
	decided bool // placed or refused
}

// account counts a user's devices.
type account struct{ held int }

// line counts a pool's queue.
type line struct{ length, place int }

// inOrder returns the requests by first submission, without touching the caller's slice.
func inOrder(waiting []fleet.Request) []entry {
	queue := make([]entry, len(waiting))
	for i := range waiting {
		queue[i].Request = &waiting[i]
	}
	earlier := func(a, b entry) int {
		return cmp.Or(a.SubmittedAt.Compare(b.SubmittedAt), cmp.Compare(a.Run.Workspace, b.Run.Workspace), cmp.Compare(a.Run.Epoch, b.Run.Epoch))
	}
	if !slices.IsSortedFunc(queue, earlier) {
		slices.SortFunc(queue, earlier)
	}
	return queue
}

// pass is one run through the queue.
type pass struct {
	*state
	now    time.Time
	queue  []entry
	shapes map[shapeKey]*shape
	plan   fleet.Plan
	again  bool

	originMaps map[originKey]map[string]string
}

// link gives each entry its user's account and its pool's line.
func (p *pass) link(held map[fleet.UserID]int) {
	accounts, lines := map[fleet.UserID]*account{}, map[string]*line{}
	for i := range p.queue {
		e := &p.queue[i]
		if e.account = accounts[e.User]; e.account == nil {
			e.account = &account{held: held[e.User]}
			accounts[e.User] = e.account
		}
		if e.line = lines[e.Spec.Pool]; e.line == nil {
			e.line = &line{}
			lines[e.Spec.Pool] = e.line
		}
	}
}

// handOver puts restarted runs back onto the devices that they kept.
func (p *pass) handOver() {
	for i := range p.queue {
		e := &p.queue[i]
		if e.KeepHost == "" {
			continue
		}
		h := p.byID[e.KeepHost]
		if h == nil || !h.view.Usable {
			continue
		}
		want := p.sizes(e.Request, h)
		if h.short(want, e.Spec.GPU.Count) != "" {
			continue
		}
		h.use(want, e.Spec.GPU.Count)
		p.add(e, h, slices.Clone(e.KeepDevices), want)
	}
}

// try places a run, or sees to its reservation.
func (p *pass) try(e *entry) {
	if e.KeepHost != "" || !e.eligible() {
		return
	}
	sh := p.shapeOf(e)
	own := p.reserved[e.Run]
	if sh.full && own == nil {
		p.wantReservation(e, sh)
		return
	}
	if own != nil && p.placeReserved(e, own) {
		return
	}
	if h, m := p.find(e.Request, sh); h != nil {
		if own != nil {
			p.drop(own)
		}
		want := p.sizes(e.Request, h)
		devices := p.take(h, m, e.Spec.GPU.Count, e.Request)
		h.use(want, e.Spec.GPU.Count)
		p.add(e, h, devices, want)
		return
	}
	sh.full = true
	if err := p.impossible(e.Request, sh); err != nil {
		e.decided = true
		p.plan.Refusals = append(p.plan.Refusals, fleet.Refusal{Run: e.Run, Err: err})
		return
	}
	p.wantReservation(e, sh)
}

// eligible reports whether the run could go on if there were room: within its user's limit, its volumes not in use.
func (e *entry) eligible() bool { return e.BusyVolume == "" && !e.overLimit() }

func (e *entry) overLimit() bool {
	return e.Spec.GPU.Count > 0 && e.GPULimit >= 0 && e.account.held+e.Spec.GPU.Count > e.GPULimit
}

// add records a placement.
func (p *pass) add(e *entry, h *host, devices []fleet.DeviceID, want sizes) {
	e.decided = true
	if e.KeepHost == "" {
		e.account.held += len(devices)
	}
	p.plan.Placements = append(p.plan.Placements, fleet.Placement{
		Run: e.Run, Host: h.view.ID, Devices: devices, CPUMillis: want.cpu, MemoryMiB: want.memory,
		ShmMiB: want.shm, PidsLimit: want.pids, Origins: p.origins(e.Request),
	})
}
