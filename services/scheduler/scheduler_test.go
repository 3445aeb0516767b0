package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/services/fleet"
)

// oneHost is a usable host with n free 4090s, 2 cores and 8 GiB for each, and a reserve for runs without devices.
func oneHost(name string, n int) fleet.HostView {
	h := fleet.HostView{
		ID: fleet.HostID("id-" + name), Name: name, Pool: "default", Usable: true, CPUMillis: int64(n) * 2000, MemoryMiB: int64(n) * 8192,
		FreeCPUMillis: int64(n) * 2000, FreeMemoryMiB: int64(n) * 8192, CPUOnlyReserve: 2000, MemOnlyReserve: 4096, FreeCPUOnly: 2000, FreeMemoryOnly: 4096,
		LeasableDevices: n, CUDAVersion: "12.4", DriverVersion: "550.54.14", GPUSource: "nvml",
	}
	for i := range n {
		h.Devices = append(h.Devices, fleet.DeviceView{ID: fleet.DeviceID(fmt.Sprintf("GPU-%s-%d", name, i)), Model: "4090", MemoryMiB: 24564, ComputeCapability: "8.9", Leasable: true, Free: true})
	}
	return h
}

func hold(h *fleet.HostView, holder string, devices ...int) {
	for _, d := range devices {
		h.Devices[d].Free, h.Devices[d].HeldBy = false, holder
		h.FreeCPUMillis -= 2000
		h.FreeMemoryMiB -= 8192
	}
}

func ask(name string, count int, change ...func(*fleet.Request)) fleet.Request {
	r := fleet.Request{
		Run: fleet.RunKey{Workspace: fleet.WorkspaceID("w" + name), Epoch: 1}, Name: name, User: "u-ana", UserName: "ana", GPULimit: -1, SubmittedAt: epoch,
		Spec: fleet.Spec{Pool: "default", Image: "torch", GPU: fleet.GPURequest{Count: count}},
	}
	for _, c := range change {
		c(&r)
	}
	return r
}

func waitOf(t *testing.T, p fleet.Plan, name string) fleet.Wait {
	t.Helper()
	for _, w := range p.Waits {
		if w.Run.Workspace == fleet.WorkspaceID("w"+name) {
			return w
		}
	}
	t.Fatalf("%s does not wait: %+v", name, p)
	return fleet.Wait{}
}

func placementOf(t *testing.T, p fleet.Plan, name string) fleet.Placement {
	t.Helper()
	for _, w := range p.Placements {
		if w.Run.Workspace == fleet.WorkspaceID("w"+name) {
			return w
		}
	}
	t.Fatalf("%s was not placed: %+v", name, p)
	return fleet.Placement{}
}

func TestDefaultsAreTheHostsShare(t *testing.T) {
	s := fleet.Snapshot{Hosts: []fleet.HostView{oneHost("h1", 4)}, Waiting: []fleet.Request{ask("two", 2), ask("none", 0)}}
	p := Plan(s, Settings{}, epoch)
	two := placementOf(t, p, "two")
	if two.CPUMillis != 4000 || two.MemoryMiB != 16384 || two.ShmMiB != 8192 || two.PidsLimit != 4096 {
		t.Errorf("two GPUs got %+v", two)
	}
	if two.Origins["memory_mib"] != originShare || two.Origins["shm_mib"] != originShm {
		t.Errorf("origins %v", two.Origins)
	}
	if none := placementOf(t, p, "none"); none.CPUMillis != 500 || none.MemoryMiB != 1024 || len(none.Devices) != 0 || none.Origins["cpu_millis"] != originCPUOnly {
		t.Errorf("without GPUs: %+v", none)
	}
}

func TestBestFitKeepsBigHoles(t *testing.T) {
	a, b, c := oneHost("a", 4), oneHost("b", 4), oneHost("c", 2)
	hold(&b, "bo/x", 0, 1)
	s := fleet.Snapshot{Hosts: []fleet.HostView{a, b, c}, Waiting: []fleet.Request{ask("x", 2), ask("y", 1), ask("z", 4)}}
	p := Plan(s, Settings{}, epoch)
	if got := placementOf(t, p, "x").Host; got != b.ID {
		t.Errorf("2 GPUs went to %s; b fits exactly and comes before c", got)
	}
	if got := placementOf(t, p, "y").Host; got != c.ID {
		t.Errorf("1 GPU went to %s, not where fewest are left over", got)
	}
	if got := placementOf(t, p, "z").Host; got != a.ID {
		t.Errorf("4 GPUs went to %s", got)
	}
}

func TestCPUOnlyStartsWhenAllGPUsAreHeld(t *testing.T) {
	h := oneHost("h1", 4)
	hold(&h, "bo/x", 0, 1, 2, 3)
	p := Plan(fleet.Snapshot{Hosts: []fleet.HostView{h}, Waiting: []fleet.Request{ask("gpu", 1), ask("cpu", 0)}}, Settings{}, epoch)
	placementOf(t, p, "cpu")
	if w := waitOf(t, p, "gpu"); w.Place != 1 || w.Length != 1 {
		t.Errorf("wait %+v", w)
	}
}

func TestReasons(t *testing.T) {
	full := oneHost("h1", 4)
	hold(&full, "ana/w1", 0, 1)
	hold(&full, "bo/w2", 2, 3)
	half := oneHost("h1", 4)
	hold(&half, "ana/w1", 0, 1, 2)
	away := oneHost("h2", 8)
	away.Usable, away.Why = false, "does not answer since 10:00:00"
	starved := oneHost("h1", 4)
	starved.FreeCPUMillis = 1000
	kept := ask("kept", 2, func(r *fleet.Request) { r.KeepHost, r.KeepDevices = away.ID, []fleet.DeviceID{"GPU-h2-0", "GPU-h2-1"} })
	for _, c := range []struct {
		name  string
		hosts []fleet.HostView
		ask   fleet.Request
		held  int
		want  string
	}{
		{"all in use", []fleet.HostView{full}, ask("n", 1), 2, "all 4 GPUs of pool default are in use: ana 2, bo 2"},
		{"model named", []fleet.HostView{full}, ask("n", 1, func(r *fleet.Request) { r.Spec.GPU.Models = []string{"4090"} }), 2, "all 4 4090 GPUs of pool default are in use: ana 2, bo 2"},
		{"too few free", []fleet.HostView{half}, ask("n", 2), 3, "it needs 2 GPUs on one host and at most 1 are free on one (h1); in use by ana 3"},
		{"CPU", []fleet.HostView{starved}, ask("n", 1), 0, "CPU: it needs 2 cores and 1 are free on h1"},
		{"memory", []fleet.HostView{starved}, ask("n", 1, func(r *fleet.Request) { r.Spec.CPUMillis, r.Spec.MemoryMiB = 500, 33*1024 }), 0, ""},
		{"away", []fleet.HostView{full, away}, ask("n", 1), 2, "all 4 GPUs of pool default are in use: ana 2, bo 2; host h2 does not answer since 10:00:00"},
		{"only away", []fleet.HostView{away}, ask("n", 1), 0, "host h2 does not answer since 10:00:00"},
		{"limit", []fleet.HostView{half}, ask("n", 1, func(r *fleet.Request) { r.GPULimit = 3 }), 3, "your limit is 3 GPUs at once and 3 are in use: w1 (3)"},
		{
			"home",
			[]fleet.HostView{full, oneHost("h3", 4)},
			ask("n", 1, func(r *fleet.Request) { r.HomeHost, r.HomeVolume = full.ID, "n-home" }), 2,
			"your home is on h1: all 4 GPUs of host h1 are in use: ana 2, bo 2",
		},
		{
			"image on one host",
			[]fleet.HostView{full, oneHost("h3", 4)},
			ask("n", 1, func(r *fleet.Request) { r.Spec.ImageHost = full.ID }), 2,
			"image torch exists only on h1: all 4 GPUs of host h1 are in use: ana 2, bo 2",
		},
		{"CONT-15 busy volume", []fleet.HostView{half}, ask("n", 0, func(r *fleet.Request) { r.BusyVolume = "data (in use by w1)" }), 3, "it waits for volume data (in use by w1)"},
		{"restart on a host that is away", []fleet.HostView{full, away}, kept, 2, "it restarts with its GPUs on h2: host h2 does not answer since 10:00:00"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := Plan(fleet.Snapshot{Hosts: c.hosts, Waiting: []fleet.Request{c.ask}, Held: map[fleet.UserID]int{"u-ana": c.held}}, Settings{}, epoch)
			if c.want == "" {
				if len(p.Refusals) == 0 {
					t.Errorf("not refused: %+v", p)
				}
				return
			}
			if w := waitOf(t, p, strings.TrimPrefix(string(c.ask.Run.Workspace), "w")); w.Why != c.want {
				t.Errorf("why\n got %s\nwant %s", w.Why, c.want)
			}
		})
	}
}

// Reasons are made once for requests of one shape, but each says only what its reader may know: of others their names and how many devices.
func TestReasonsTellNothingOfOthersBelongings(t *testing.T) {
	full := oneHost("h1", 4)
	hold(&full, "ana/secret-run", 0, 1, 2, 3)
	full.CUDAVersion = "12.2"
	old := func(r *fleet.Request) { r.Spec.RequireCUDA = "cuda>=13.0" }
	of := func(user string, change ...func(*fleet.Request)) func(*fleet.Request) {
		return func(r *fleet.Request) {
			r.User, r.UserName, r.Spec.Image = fleet.UserID("u-"+user), user, user+"-image"
			for _, c := range change {
				c(r)
			}
		}
	}
	volume := func(name string) func(*fleet.Request) {
		return func(r *fleet.Request) { r.HomeHost, r.HomeVolume = full.ID, name }
	}
	pinned := func(r *fleet.Request) { r.Spec.ImageHost = full.ID }
	waiting := []fleet.Request{
		ask("ana1", 1, of("ana", volume("secret-data"))), ask("bo1", 1, of("bo", volume("bo1-home"))), ask("bo2", 1, of("bo", volume("bo-data"))),
		ask("ana2", 1, of("ana", pinned)), ask("bo3", 1, of("bo", pinned)),
		ask("ana3", 1, of("ana", old)), ask("bo4", 1, of("bo", old)), ask("bo5", 1, of("bo")),
	}
	p := Plan(fleet.Snapshot{Hosts: []fleet.HostView{full}, Waiting: waiting, Held: map[fleet.UserID]int{"u-ana": 4}}, Settings{}, epoch)
	if len(p.Waits)+len(p.Refusals) != len(waiting) {
		t.Fatalf("%+v", p)
	}
	told := map[fleet.WorkspaceID]string{}
	for _, w := range p.Waits {
		told[w.Run.Workspace] = w.Why
	}
	for _, r := range p.Refusals {
		told[r.Run.Workspace] = r.Err.Error()
	}
	for id, text := range told {
		if strings.HasPrefix(string(id), "wbo") && (strings.Contains(text, "secret") || strings.Contains(text, "ana-image")) {
			t.Errorf("%s is told: %s", id, text)
		}
		if strings.HasPrefix(string(id), "wana") && strings.Contains(text, "secret-run") {
			t.Errorf("%s is told: %s", id, text)
		}
	}
	if got, want := told["wbo5"], "all 4 GPUs of pool default are in use: ana 4"; got != want {
		t.Errorf("why\n got %s\nwant %s", got, want)
	}
}

func TestRestartGoesBackBeforeAnybodyElse(t *testing.T) {
	h := oneHost("h1", 2)
	hold(&h, "ana/again", 0, 1)
	h.FreeCPUMillis, h.FreeMemoryMiB = 4000, 16384 // the old run is gone, its devices passed over
	again := ask("again", 2, func(r *fleet.Request) {
		r.KeepHost, r.KeepDevices, r.SubmittedAt, r.GPULimit = h.ID, []fleet.DeviceID{"GPU-h1-0", "GPU-h1-1"}, epoch.Add(time.Hour), 1
	})
	p := Plan(fleet.Snapshot{Hosts: []fleet.HostView{h}, Waiting: []fleet.Request{ask("first", 2), again}, Held: map[fleet.UserID]int{"u-ana": 2}}, Settings{}, epoch.Add(time.Hour))
	if got := placementOf(t, p, "again"); !slices.Equal(got.Devices, again.KeepDevices) {
		t.Errorf("restart got %v", got.Devices)
	}
	waitOf(t, p, "first")
}

// SCHED-05, L3: one-GPU runs of five minutes arrive every minute; a four-GPU run gets a reservation after ten and starts within one lifetime.
func TestSCHED_05_AReservationEndsStarvation(t *testing.T) {
	h := oneHost("h1", 4)
	s := fleet.Snapshot{Hosts: []fleet.HostView{h}}
	ends := map[fleet.DeviceID]time.Time{}
	var bigAt time.Time
	for minute := range 60 {
		now := epoch.Add(time.Duration(minute) * time.Minute)
		for i := range s.Hosts[0].Devices {
			if d := &s.Hosts[0].Devices[i]; d.HeldBy != "" && !now.Before(ends[d.ID]) {
				d.Free, d.HeldBy = true, ""
				s.Hosts[0].FreeCPUMillis += 2000
				s.Hosts[0].FreeMemoryMiB += 8192
			}
		}
		for range 2 { // twice as many as the case asks for, and more than there is room for
			s.Waiting = append(s.Waiting, ask(fmt.Sprintf("small%d-%d", minute, len(s.Waiting)), 1, func(r *fleet.Request) { r.SubmittedAt = now }))
		}
		if minute == 10 {
			s.Waiting = append(s.Waiting, ask("big", 4, func(r *fleet.Request) { r.SubmittedAt = now }))
		}
		p := Plan(s, Settings{}, now)
		for _, pl := range p.Placements {
			for _, d := range pl.Devices {
				ends[d] = now.Add(5 * time.Minute)
			}
			if pl.Run.Workspace == "wbig" {
				bigAt = now
			}
		}
		s = after(s, p)
	}
	if wait := bigAt.Sub(epoch.Add(10 * time.Minute)); bigAt.IsZero() || wait > 15*time.Minute {
		t.Fatalf("the large one waited %v; at most 10 min and one lifetime were promised", wait)
	}
}

func TestAReservationIsNamed(t *testing.T) {
	h := oneHost("h1", 4)
	hold(&h, "bo/x", 0, 1)
	now := epoch.Add(11 * time.Minute)
	s := fleet.Snapshot{Hosts: []fleet.HostView{h}, Waiting: []fleet.Request{ask("big", 4), ask("small", 1, func(r *fleet.Request) { r.SubmittedAt = now })}}
	p := Plan(s, Settings{}, now)
	if len(p.Reservations) != 1 || len(p.Reservations[0].Devices) != 2 || p.Reservations[0].Run.Workspace != "wbig" {
		t.Fatalf("reservations %+v", p.Reservations)
	}
	if w := waitOf(t, p, "small"); w.Why != "2 GPUs free on h1 are being kept for a workspace of ana, which has waited longer" || w.Place != 2 || w.Length != 2 {
		t.Errorf("small: %+v", w)
	}
	if w := waitOf(t, p, "big"); !strings.Contains(w.Why, "2 of the 4 GPUs it needs are being kept for it on h1") {
		t.Errorf("big: %+v", w)
	}
}

// CLI-11: what can never be met is refused at once, with the limit or the largest possible; what merely waits is not.
func TestCLI_11_Feasible(t *testing.T) {
	full := oneHost("h1", 4)
	hold(&full, "bo/x", 0, 1, 2, 3)
	away := oneHost("h2", 8)
	away.Usable, away.Why = false, "does not answer"
	fresh := fleet.HostView{ID: "new", Name: "new", Pool: "default"}
	sick := oneHost("h1", 2)
	sick.Devices[1].Leasable, sick.Devices[1].Why = false, "failed: Xid 79"
	models := func(m ...string) func(*fleet.Request) { return func(r *fleet.Request) { r.Spec.GPU.Models = m } }
	for _, c := range []struct {
		name  string
		hosts []fleet.HostView
		ask   fleet.Request
		kind  fleet.Kind
		want  string // empty: feasible
	}{
		{"control", []fleet.HostView{full}, ask("n", 4), 0, ""},
		{"host away", []fleet.HostView{full, away}, ask("n", 8), 0, ""},
		{"host not yet known", []fleet.HostView{fresh}, ask("n", 8), 0, ""},
		{"too many", []fleet.HostView{full}, ask("n", 5), fleet.KindExhausted, "5 GPUs on one host are more than pool default has: the largest possible is 4 (4090 on h1)"},
		{"limit", []fleet.HostView{full}, ask("n", 2, func(r *fleet.Request) { r.GPULimit = 1 }), fleet.KindExhausted, "2 GPUs are more than your limit of 1 at once (0 in use)"},
		{"model", []fleet.HostView{full}, ask("n", 1, models("5090")), fleet.KindInvalid, "pool default has no GPU of model 5090; it has 4090 (4)"},
		{"memory", []fleet.HostView{full}, ask("n", 1, func(r *fleet.Request) { r.Spec.MemoryMiB = 1 << 20 }), fleet.KindExhausted, "1024 GiB of memory are more than any host of pool default offers: the largest possible is 32 GiB (h1)"},
		{"CPU", []fleet.HostView{full}, ask("n", 1, func(r *fleet.Request) { r.Spec.CPUMillis = 64000 }), fleet.KindExhausted, "64 cores are more than any host of pool default offers: the largest possible is 8 (h1)"},
		{"no hosts", nil, ask("n", 1), fleet.KindConflict, "pool default has no hosts"},
		{"sick", []fleet.HostView{sick}, ask("n", 2), fleet.KindExhausted, "the largest possible is 1 (4090 on h1); GPU-h1-1 on h1: failed: Xid 79"},
		{
			"GPU-14 too old",
			[]fleet.HostView{full},
			ask("n", 1, func(r *fleet.Request) { r.Spec.RequireCUDA = "cuda>=12.8 brand=tesla,driver>=470,driver<471" }), fleet.KindConflict,
			"no host of pool default can run image torch: it needs cuda>=12.8 brand=tesla,driver>=470,driver<471; h1 has CUDA 12.4, driver 550.54.14",
		},
		{"GPU-14 new enough", []fleet.HostView{full}, ask("n", 1, func(r *fleet.Request) { r.Spec.RequireCUDA = "cuda>=12.0" }), 0, ""},
		{"home elsewhere", []fleet.HostView{full}, ask("n", 1, func(r *fleet.Request) { r.HomeHost = "gone" }), fleet.KindConflict, "the host of its home or image is gone"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := Feasible(fleet.Snapshot{Hosts: c.hosts}, c.ask, Settings{})
			if c.want == "" {
				if err != nil {
					t.Errorf("refused: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.want) || fleet.KindOf(err) != c.kind {
				t.Errorf("\n got %v (%v)\nwant %s (%v)", err, fleet.KindOf(err), c.want, c.kind)
			}
		})
	}
}

// SCHED-17: devices that became unhealthy are neither given out nor counted as free.
func TestSCHED_17_UnhealthyDevicesAreNotGivenOut(t *testing.T) {
	h := oneHost("h1", 4)
	hold(&h, "bo/x", 0, 1, 2)
	for i := range h.Devices {
		h.Devices[i].Leasable, h.Devices[i].Free, h.Devices[i].Why = false, false, "failed: Xid 79"
	}
	p := Plan(fleet.Snapshot{Hosts: []fleet.HostView{h}, Waiting: []fleet.Request{ask("n", 1)}}, Settings{}, epoch)
	if len(p.Placements) != 0 || len(p.Refusals) != 0 {
		t.Fatalf("plan %+v", p)
	}
	if w := waitOf(t, p, "n"); !strings.Contains(w.Why, "no host that answers has more than 0") || !strings.Contains(w.Why, "Xid 79") {
		t.Errorf("why %s", w.Why)
	}
}

// A share stays the same while a device is away for a time, and grows when one is gone for good.
func TestSharesCountDevicesThatComeBack(t *testing.T) {
	h := oneHost("h1", 4)
	h.Devices[3].Leasable, h.Devices[3].Free, h.Devices[3].Why = false, false, "foreign: used by pid 7"
	s := fleet.Snapshot{Hosts: []fleet.HostView{h}, Waiting: []fleet.Request{ask("n", 1)}}
	if got := placementOf(t, Plan(s, Settings{}, epoch), "n").CPUMillis; got != 2000 {
		t.Errorf("beside a foreign device the share is %d", got)
	}
	h.Devices[3].Why = "lost: GPU_IS_LOST"
	if got := placementOf(t, Plan(s, Settings{}, epoch), "n").CPUMillis; got != 2000 {
		t.Errorf("beside a lost device the share is %d", got)
	}
	h.Devices[3].NoShare = true
	if got := placementOf(t, Plan(s, Settings{}, epoch), "n").CPUMillis; got != 8000/3 {
		t.Errorf("beside a device that is gone the share is %d", got)
	}
}

// GPU-14: spaces part alternatives, commas part conditions that must hold together.
func TestGPU_14_Requirement(t *testing.T) {
	h := facts{cuda: "12.4", driver: "550.54.14", arch: "8.9", given: true}
	old := facts{cuda: "11.4", driver: "470.82.01", arch: "8.0", given: true}
	geforce := old
	geforce.brand = "geforce"
	for _, c := range []struct {
		text string
		f    facts
		want bool
	}{
		{"", h, true},
		{"cuda>=12.4", h, true},
		{"cuda>=12.8", h, false},
		{"cuda>=12.10", h, false},
		{"cuda>=9.2", h, true},
		{"cuda>=12.8 driver>=550", h, true},
		{"cuda>=12.8,driver>=550", h, false},
		{"cuda>=12.8 brand=tesla,driver>=470,driver<471", h, false},
		{"cuda>=12.8 brand=tesla,driver>=470,driver<471", old, true},
		{"cuda>=12.8 brand=tesla,driver>=470,driver<471", geforce, false},
		{"arch>=9.0", h, false},
		{"cuda!=12.4", h, false},
		{"nonsense", h, true},
		{"cuda>=99", facts{}, true},
	} {
		if got := parseRequirement(c.text).holds(c.f); got != c.want {
			t.Errorf("%q on %+v: %v", c.text, c.f, got)
		}
	}
}
