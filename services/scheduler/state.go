package scheduler

import (
	"cmp"
	"math/bits"
	"slices"

	"github.com/carrel-dev/carrel/services/fleet"
)

// state is what is left of the fleet as a pass goes on. Everything in it is the pass's own copy.
type state struct {
	set      Settings
	hosts    []*host // by name
	byID     map[fleet.HostID]*host
	pools    map[string]*pool
	reserved map[fleet.RunKey]*reservation
	slots    map[slot]*reservation
	free     int // devices that were free at the start
}

// pool is a pool's hosts by name and its models from the smallest memory up.
type pool struct {
	name    string
	hosts   []*host
	cpuOnly []*host // usable ones, those without devices first
	models  []*model
	byName  map[string]*model
}

// model indexes the usable hosts of a pool by how many devices of the model they have free.
type model struct {
	name    string
	memory  int64
	total   int        // devices of the model in the pool, whatever their health
	buckets [][]uint64 // by free count: bits over the pool's hosts
}

// host is a host with what is left on it.
type host struct {
	view    *fleet.HostView
	pool    *pool
	place   int   // in pool.hosts
	shares  int64 // devices that share its CPU and memory
	stocks  []stock
	free    room // for runs with devices
	cpuOnly room // for runs without
	claim   *reservation
	placed  map[fleet.DeviceID]string // devices given out in this pass, to whom
}

// room is CPU and memory.
type room struct{ cpu, memory int64 }

// stock is a host's devices of one model.
type stock struct {
	model      string
	total      int // whatever their health
	leasable   int
	free       []fleet.DeviceID // by id; taken from the front
	capability string
}

func newState(snapshot fleet.Snapshot, set Settings) *state {
	s := &state{
		set: set, byID: make(map[fleet.HostID]*host, len(snapshot.Hosts)), pools: map[string]*pool{},
		reserved: map[fleet.RunKey]*reservation{}, slots: map[slot]*reservation{},
	}
	views := make([]*fleet.HostView, len(snapshot.Hosts))
	for i := range snapshot.Hosts {
		views[i] = &snapshot.Hosts[i]
	}
	slices.SortFunc(views, func(a, b *fleet.HostView) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	for _, v := range views {
		s.addHost(v)
	}
	for _, p := range s.pools {
		p.index()
	}
	return s
}

func (s *state) addHost(v *fleet.HostView) {
	p := s.pools[v.Pool]
	if p == nil {
		p = &pool{name: v.Pool, byName: map[string]*model{}}
		s.pools[v.Pool] = p
	}
	byID := func(a, b fleet.DeviceView) int { return cmp.Compare(a.ID, b.ID) }
	if !slices.IsSortedFunc(v.Devices, byID) {
		sorted := *v
		sorted.Devices = slices.SortedFunc(slices.Values(v.Devices), byID)
		v = &sorted
	}
	h := &host{view: v, pool: p, place: len(p.hosts), free: room{v.FreeCPUMillis, v.FreeMemoryMiB}, cpuOnly: room{v.FreeCPUOnly, v.FreeMemoryOnly}}
	h.stocks, h.shares = stocksOf(v), h.devices()
	for _, st := range h.stocks {
		s.free += len(st.free)
	}
	p.hosts = append(p.hosts, h)
	s.hosts = append(s.hosts, h)
	s.byID[v.ID] = h
}

// stocksOf sorts a host's devices by model; nearly every host has one.
func stocksOf(v *fleet.HostView) []stock {
	var out []stock
	for i := range v.Devices {
		d := &v.Devices[i]
		at := slices.IndexFunc(out, func(st stock) bool { return st.model == d.Model })
		if at < 0 {
			at = len(out)
			out = append(out, stock{model: d.Model, free: make([]fleet.DeviceID, 0, len(v.Devices))})
		}
		st := &out[at]
		st.total++
		st.capability = cmp.Or(st.capability, d.ComputeCapability)
		if d.Leasable {
			st.leasable++
		}
		if d.Leasable && d.Free {
			st.free = append(st.free, d.ID)
		}
	}
	slices.SortFunc(out, func(a, b stock) int { return cmp.Compare(a.model, b.model) })
	return out
}

// index fills a pool's models and buckets.
func (p *pool) index() {
	words := (len(p.hosts) + 63) / 64
	for _, h := range p.hosts {
		for i := range h.view.Devices {
			d := &h.view.Devices[i]
			if m := p.byName[d.Model]; m == nil {
				m = &model{name: d.Model, memory: d.MemoryMiB}
				p.byName[d.Model] = m
				p.models = append(p.models, m)
			} else {
				m.memory = min(m.memory, d.MemoryMiB)
			}
		}
		for i := range h.stocks {
			m := p.byName[h.stocks[i].model]
			m.total += h.stocks[i].total
			if h.view.Usable {
				m.put(h, len(h.stocks[i].free), words)
			}
		}
		if h.view.Usable {
			p.cpuOnly = append(p.cpuOnly, h)
		}
	}
	slices.SortStableFunc(p.cpuOnly, func(a, b *host) int { return cmp.Compare(min(len(a.stocks), 1), min(len(b.stocks), 1)) })
	slices.SortFunc(p.models, func(a, b *model) int { return cmp.Or(cmp.Compare(a.memory, b.memory), cmp.Compare(a.name, b.name)) })
}

// put enters a host under a free count.
func (m *model) put(h *host, free, words int) {
	for len(m.buckets) <= free {
		m.buckets = append(m.buckets, make([]uint64, words))
	}
	m.buckets[free][h.place/64] |= 1 << (h.place % 64)
}

// move takes a host from one free count to another.
func (m *model) move(h *host, from, to int) {
	if from == to || !h.view.Usable {
		return
	}
	m.buckets[from][h.place/64] &^= 1 << (h.place % 64)
	m.put(h, to, len(m.buckets[from]))
}

// best calls fits for the usable hosts that have at least count devices free, fewest left over first, then by name, until it holds.
func (m *model) best(p *pool, count int, fits func(*host) bool) *host {
	for n := count; n < len(m.buckets); n++ {
		for w, word := range m.buckets[n] {
			for ; word != 0; word &= word - 1 {
				if h := p.hosts[w*64+bits.TrailingZeros64(word)]; fits(h) {
					return h
				}
			}
		}
	}
	return nil
}

// stock returns a host's devices of a model, nil when it has none.
func (h *host) stock(model string) *stock {
	for i := range h.stocks {
		if h.stocks[i].model == model {
			return &h.stocks[i]
		}
	}
	return nil
}

// devices is the number that a host's CPU and memory are shared among: all of its inventory, also those that fail, are lost or that
// somebody else uses now, since a share must still be there when they come back.
func (h *host) devices() int64 {
	n := int64(0)
	for i := range h.view.Devices {
		if !h.view.Devices[i].NoShare {
			n++
		}
	}
	return n
}

// unknown reports whether the host has not told yet what it has.
func (h *host) unknown() bool { return h.view.CPUMillis == 0 && len(h.view.Devices) == 0 }

// take removes count devices of a model from a host's free ones.
func (p *pass) take(h *host, m *model, count int, r *fleet.Request) []fleet.DeviceID {
	if count == 0 {
		return nil
	}
	st := h.stock(m.name)
	before := len(st.free)
	devices := slices.Clone(st.free[:count])
	st.free = st.free[count:]
	m.move(h, before, len(st.free))
	h.note(devices, r)
	return devices
}

// note remembers who got devices in this pass, for the reasons of those who did not.
func (h *host) note(devices []fleet.DeviceID, r *fleet.Request) {
	if h.placed == nil {
		h.placed = make(map[fleet.DeviceID]string, len(devices))
	}
	name := r.UserName + "/" + r.Name
	for _, d := range devices {
		h.placed[d] = name
	}
}
