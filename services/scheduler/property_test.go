package scheduler

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/carrel-dev/carrel/services/fleet"
)

var epoch = time.Date(2026, 12, 1, 10, 0, 0, 0, time.UTC)

// drawSnapshot makes a fleet of up to six hosts with devices held, unhealthy and free, and up to twelve waiting runs.
func drawSnapshot(t *rapid.T) fleet.Snapshot {
	var s fleet.Snapshot
	s.Held = map[fleet.UserID]int{}
	models := []string{"4090", "A100-80GB"}
	for i := range rapid.IntRange(0, 6).Draw(t, "hosts") {
		h := fleet.HostView{
			ID: fleet.HostID(fmt.Sprintf("h%d", i)), Name: fmt.Sprintf("host%d", i), Pool: rapid.SampledFrom([]string{"default", "big"}).Draw(t, "pool"),
			Usable: rapid.IntRange(0, 4).Draw(t, "usable") > 0, Why: "does not answer", CPUMillis: 16000, MemoryMiB: 64000,
			CPUOnlyReserve: 2000, MemOnlyReserve: 6000, CUDAVersion: rapid.SampledFrom([]string{"12.4", "12.8"}).Draw(t, "cuda"), DriverVersion: "550.54.14", GPUSource: "nvml",
		}
		n := rapid.IntRange(0, 8).Draw(t, "devices")
		h.LeasableDevices = n
		share := room{16000, 64000}
		if n > 0 {
			share = room{16000 / int64(n), 64000 / int64(n)}
		}
		h.FreeCPUMillis, h.FreeMemoryMiB = 16000, 64000
		h.FreeCPUOnly, h.FreeMemoryOnly = rapid.Int64Range(0, 2000).Draw(t, "cpuonly"), 6000
		if n == 0 { // then all of it is for runs without devices
			h.CPUOnlyReserve, h.MemOnlyReserve, h.FreeCPUOnly, h.FreeMemoryOnly = 16000, 64000, 16000, 64000
		}
		model := rapid.SampledFrom(models).Draw(t, "model")
		for d := range n {
			v := fleet.DeviceView{ID: fleet.DeviceID(fmt.Sprintf("%s-g%d", h.ID, d)), Model: model, MemoryMiB: 24000, Leasable: true, Free: true}
			switch rapid.IntRange(0, 3).Draw(t, "held") {
			case 0:
				user := fleet.UserID(rapid.SampledFrom([]string{"u0", "u1"}).Draw(t, "holder"))
				v.Free, v.HeldBy = false, string(user)+"/x"
				s.Held[user]++
				h.FreeCPUMillis -= share.cpu
				h.FreeMemoryMiB -= share.memory
			case 1:
				if rapid.Bool().Draw(t, "sick") {
					v.Leasable, v.Free, v.Why = false, false, "failed: Xid 79"
				}
			}
			h.Devices = append(h.Devices, v)
		}
		s.Hosts = append(s.Hosts, h)
	}
	for i := range rapid.IntRange(0, 12).Draw(t, "waiting") {
		user := rapid.SampledFrom([]string{"u0", "u1", "u2"}).Draw(t, "user")
		r := fleet.Request{
			Run: fleet.RunKey{Workspace: fleet.WorkspaceID(fmt.Sprintf("w%02d", i)), Epoch: 1}, Name: fmt.Sprintf("n%d", i), User: fleet.UserID(user), UserName: user,
			GPULimit:    rapid.SampledFrom([]int{-1, -1, 3, 6}).Draw(t, "limit"),
			SubmittedAt: epoch.Add(-time.Duration(rapid.IntRange(0, 30).Draw(t, "age")) * time.Minute),
			Spec: fleet.Spec{
				Pool: rapid.SampledFrom([]string{"default", "big"}).Draw(t, "wpool"), CPUMillis: rapid.SampledFrom([]int64{0, 0, 0, 3000}).Draw(t, "cpu"),
				GPU:         fleet.GPURequest{Count: rapid.IntRange(0, 5).Draw(t, "count"), Models: rapid.SampledFrom([][]string{nil, {"4090"}, {"A100-80GB", "4090"}}).Draw(t, "models")},
				RequireCUDA: rapid.SampledFrom([]string{"", "", "cuda>=12.6"}).Draw(t, "require"),
			},
		}
		if len(s.Hosts) > 0 && rapid.IntRange(0, 4).Draw(t, "home") == 0 {
			r.HomeHost = s.Hosts[rapid.IntRange(0, len(s.Hosts)-1).Draw(t, "homehost")].ID
		}
		s.Waiting = append(s.Waiting, r)
	}
	return s
}

// after carries a plan out, as a store would.
func after(s fleet.Snapshot, plan fleet.Plan) fleet.Snapshot {
	out := s
	out.Reservations = plan.Reservations
	out.Held = map[fleet.UserID]int{}
	for u, n := range s.Held {
		out.Held[u] = n
	}
	out.Hosts = slices.Clone(s.Hosts)
	for i := range out.Hosts {
		out.Hosts[i].Devices = slices.Clone(out.Hosts[i].Devices)
	}
	gone := map[fleet.RunKey]bool{}
	for _, p := range plan.Placements {
		gone[p.Run] = true
		r := request(s, p.Run)
		out.Held[r.User] += len(p.Devices)
		for i := range out.Hosts {
			h := &out.Hosts[i]
			if h.ID != p.Host {
				continue
			}
			if len(p.Devices) > 0 {
				h.FreeCPUMillis -= p.CPUMillis
				h.FreeMemoryMiB -= p.MemoryMiB
			}
			if len(p.Devices) == 0 {
				h.FreeCPUOnly -= p.CPUMillis
				h.FreeMemoryOnly -= p.MemoryMiB
			}
			for j := range h.Devices {
				if slices.Contains(p.Devices, h.Devices[j].ID) {
					h.Devices[j].Free, h.Devices[j].HeldBy = false, r.UserName+"/"+r.Name
				}
			}
		}
	}
	for _, r := range plan.Refusals {
		gone[r.Run] = true
	}
	out.Waiting = slices.DeleteFunc(slices.Clone(s.Waiting), func(r fleet.Request) bool { return gone[r.Run] })
	return out
}

func request(s fleet.Snapshot, key fleet.RunKey) fleet.Request {
	for _, r := range s.Waiting {
		if r.Run == key {
			return r
		}
	}
	return fleet.Request{}
}

// checkPlan holds a plan against the rules, written again from their text.
func checkPlan(t *rapid.T, s fleet.Snapshot, plan fleet.Plan) {
	seen := map[fleet.DeviceID]bool{}
	answered := map[fleet.RunKey]int{}
	held := map[fleet.UserID]int{}
	for u, n := range s.Held {
		held[u] = n
	}
	for _, p := range plan.Placements {
		answered[p.Run]++
		r := request(s, p.Run)
		if len(p.Devices) != r.Spec.GPU.Count {
			t.Fatalf("%v got %d devices, asked for %d", p.Run, len(p.Devices), r.Spec.GPU.Count)
		}
		model := ""
		for _, d := range p.Devices {
			if seen[d] {
				t.Fatalf("SCHED-01: device %s given twice", d)
			}
			seen[d] = true
			h, v := device(s, d)
			if h.ID != p.Host || !v.Free || !v.Leasable || !h.Usable || h.Pool != r.Spec.Pool {
				t.Fatalf("%v got %s, which it cannot have", p.Run, d)
			}
			if model == "" {
				model = v.Model
			}
			if v.Model != model || (len(r.Spec.GPU.Models) > 0 && !slices.Contains(r.Spec.GPU.Models, v.Model)) {
				t.Fatalf("%v got a %s", p.Run, v.Model)
			}
		}
		held[r.User] += len(p.Devices)
		if len(p.Devices) > 0 && r.GPULimit >= 0 && held[r.User] > r.GPULimit {
			t.Fatalf("I12: %s holds %d of %d", r.User, held[r.User], r.GPULimit)
		}
		if r.HomeHost != "" && r.HomeHost != p.Host {
			t.Fatalf("%v placed away from its home", p.Run)
		}
		if p.CPUMillis <= 0 || p.MemoryMiB <= 0 || p.ShmMiB != p.MemoryMiB/2 || p.PidsLimit != 4096 {
			t.Fatalf("sizes of %v: %+v", p.Run, p)
		}
	}
	for _, w := range plan.Waits {
		answered[w.Run]++
		if w.Why == "" || w.Place < 1 || w.Place > w.Length {
			t.Fatalf("wait %+v", w)
		}
	}
	for _, r := range plan.Refusals {
		answered[r.Run]++
	}
	for _, r := range s.Waiting {
		if answered[r.Run] != 1 {
			t.Fatalf("%v has %d answers", r.Run, answered[r.Run])
		}
	}
	next := after(s, plan)
	for _, h := range next.Hosts {
		if h.FreeCPUMillis < 0 || h.FreeMemoryMiB < 0 || h.FreeCPUOnly < 0 || h.FreeMemoryOnly < 0 {
			t.Fatalf("host %s is overcommitted: %+v", h.ID, h)
		}
	}
	checkConserving(t, next, plan)
}

// checkConserving is L2: nothing that waits has a place now, unless the place is reserved for somebody named.
func checkConserving(t *rapid.T, next fleet.Snapshot, plan fleet.Plan) {
	reserved := map[fleet.DeviceID]bool{}
	claimed := map[fleet.HostID]bool{}
	for _, r := range plan.Reservations {
		claimed[r.Host] = true
		for _, d := range r.Devices {
			if h, v := device(next, d); !v.Free || h.ID != r.Host || reserved[d] {
				t.Fatalf("reservation of %s, which is not free", d)
			}
			reserved[d] = true
		}
	}
	for _, r := range next.Waiting {
		if r.Spec.GPU.Count > 0 && r.GPULimit >= 0 && next.Held[r.User]+r.Spec.GPU.Count > r.GPULimit {
			continue
		}
		for _, h := range next.Hosts {
			if !h.Usable || h.Pool != r.Spec.Pool || claimed[h.ID] || (r.HomeHost != "" && r.HomeHost != h.ID) || (r.Spec.RequireCUDA != "" && r.Spec.GPU.Count > 0 && h.CUDAVersion == "12.4") {
				continue
			}
			free := map[string]int{}
			for _, d := range h.Devices {
				if d.Free && d.Leasable && (len(r.Spec.GPU.Models) == 0 || slices.Contains(r.Spec.GPU.Models, d.Model)) {
					free[d.Model]++
				}
			}
			cpu, memory, freeCPU, freeMemory := r.Spec.CPUMillis, int64(0), h.FreeCPUMillis, h.FreeMemoryMiB
			count := int64(r.Spec.GPU.Count)
			if count == 0 {
				freeCPU, freeMemory, memory = h.FreeCPUOnly, h.FreeMemoryOnly, min(4096, h.MemOnlyReserve/4)
				if cpu == 0 {
					cpu = min(2000, h.CPUOnlyReserve/4)
				}
			} else if n := int64(len(h.Devices)); n > 0 {
				memory = 64000 / n * count
				if cpu == 0 {
					cpu = 16000 / n * count
				}
			}
			fits := count == 0
			for _, n := range free {
				fits = fits || int64(n) >= count
			}
			if fits && cpu <= freeCPU && memory <= freeMemory {
				t.Fatalf("L2: %v waits although it fits on %s (%+v); plan %+v", r, h.ID, h, plan)
			}
		}
	}
}

func device(s fleet.Snapshot, id fleet.DeviceID) (fleet.HostView, fleet.DeviceView) {
	for _, h := range s.Hosts {
		for _, d := range h.Devices {
			if d.ID == id {
				return h, d
			}
		}
	}
	return fleet.HostView{}, fleet.DeviceView{}
}

func TestSCHED_01_PlanKeepsEveryRule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		now := epoch
		for range 3 { // reservations carry over
			plan := Plan(s, Settings{}, now)
			checkPlan(t, s, plan)
			s = after(s, plan)
			now = now.Add(5 * time.Minute)
			for i := range s.Hosts { // somebody ends
				for j := range s.Hosts[i].Devices {
					if d := &s.Hosts[i].Devices[j]; d.HeldBy != "" && rapid.IntRange(0, 3).Draw(t, "end") == 0 && s.Hosts[i].FreeCPUMillis+16000/int64(len(s.Hosts[i].Devices)) <= 16000 {
						s.Held[fleet.UserID(d.HeldBy[:2])]--
						d.Free, d.HeldBy = true, ""
						s.Hosts[i].FreeCPUMillis += 16000 / int64(len(s.Hosts[i].Devices))
						s.Hosts[i].FreeMemoryMiB = min(64000, s.Hosts[i].FreeMemoryMiB+64000/int64(len(s.Hosts[i].Devices)))
					}
				}
			}
		}
	})
}

// M1: equal snapshots in another order give the same plan.
func TestPlanIsTheSameInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawSnapshot(t)
		first := Plan(s, Settings{}, epoch)
		s.Reservations = first.Reservations
		first = Plan(s, Settings{}, epoch)
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		o := s
		o.Hosts, o.Waiting, o.Reservations = slices.Clone(s.Hosts), slices.Clone(s.Waiting), slices.Clone(s.Reservations)
		r.Shuffle(len(o.Hosts), func(i, j int) { o.Hosts[i], o.Hosts[j] = o.Hosts[j], o.Hosts[i] })
		r.Shuffle(len(o.Waiting), func(i, j int) { o.Waiting[i], o.Waiting[j] = o.Waiting[j], o.Waiting[i] })
		r.Shuffle(len(o.Reservations), func(i, j int) {
			o.Reservations[i], o.Reservations[j] = o.Reservations[j], o.Reservations[i]
		})
		for i := range o.Hosts {
			d := slices.Clone(o.Hosts[i].Devices)
			r.Shuffle(len(d), func(i, j int) { d[i], d[j] = d[j], d[i] })
			o.Hosts[i].Devices = d
		}
		if again := Plan(o, Settings{}, epoch); !reflect.DeepEqual(first, again) {
			t.Fatalf("another order gives another plan:\n%+v\n%+v", first, again)
		}
	})
}
