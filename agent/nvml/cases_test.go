//go:build cgo && linux

package nvml

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/gpu/gputest"
	"github.com/carrel-dev/carrel/agent/nvml/testlib"
)

func TestContractTestLibrary(t *testing.T) {
	gputest.Contract(t, func(t *testing.T) gpu.Source {
		return newHost(t, "gpu0.name", "NVIDIA A100-SXM4-80GB", "gpu0.memory_total", "81920", "gpu0.mig", "on",
			"gpu0.mig0", "MIG-30d00c09-0000-4000-8000-000000000001 1g.10gb 9728", "gpu1.util", "50").Source
	})
}

// stack is a host with all decorators, the records kept in memory over restarts.
type stack struct {
	*host
	src     gpu.Source
	watched *gpu.Watched
	kept    *store
}

type store struct{ records []gpu.HealthRecord }

func (s *store) Load() ([]gpu.HealthRecord, error) { return slices.Clone(s.records), nil }

func (s *store) Save(records []gpu.HealthRecord) error {
	s.records = slices.Clone(records)
	return nil
}

func newStack(t *testing.T, pairs ...string) *stack {
	t.Helper()
	s := &stack{host: newHost(t, pairs...), kept: &store{}}
	s.restart(t)
	return s
}

// restart is a new agent on the same library with the records of the last one.
func (s *stack) restart(t *testing.T) {
	t.Helper()
	var err error
	s.watched, s.src, err = gpu.Stack(s.Source, gpu.StackConfig{
		Now: s.clock.Now, InventoryTTL: time.Second, KeepStale: 5 * time.Minute,
		Health: gpu.HealthConfig{Store: s.kept, Proof: 5 * time.Minute},
		OwnerOf: func(pid int) gpu.Owner {
			if pid == 500 {
				return gpu.Owner{Name: "train.py", Workspace: "w1", Ours: true}
			}
			return gpu.Owner{Name: fmt.Sprintf("p%d", pid)}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (s *stack) look(t *testing.T) gpu.Inventory {
	t.Helper()
	s.clock.advance(time.Second)
	return inventoryOf(t, s.src)
}

// TestGPU03 is GPU-03 (NVIDIA/k8s-device-plugin#231): a GPU that fell off the bus hides no other.
func TestGPU03(t *testing.T) {
	s := newStack(t)
	wantAllocatable(t, s.look(t), 4)
	s.Set(t, "gpu2.err.uuid", "GPU_IS_LOST", "order", "0 1 2 3")
	for range 2 {
		inv := s.look(t)
		wantAllocatable(t, inv, 3)
		d := device(t, inv, uuid2)
		if d.Health.State != gpu.Lost {
			t.Errorf("health of the lost one: %+v", d.Health)
		}
		wantText(t, d.Health.Reason, "GPU_IS_LOST")
	}
	s.Set(t, "order", "0 1 3") // NVML renumbers
	for range 2 {
		inv := s.look(t)
		wantAllocatable(t, inv, 3)
		if d := device(t, inv, uuid2); d.Health.State != gpu.Lost || d.Model == "" || d.MemoryMiB == 0 {
			t.Errorf("the lost one: %+v", d)
		}
		if len(inv.Devices) != 4 {
			t.Errorf("%d devices", len(inv.Devices))
		}
		ok, reason := gpu.Leased(inv, uuid2)
		if ok {
			t.Error("a workspace on the lost GPU is not flagged")
		}
		wantText(t, reason, uuid2, "lost")
		s.restart(t) // and it is known over a restart
	}
	s.Unset(t, "order", "gpu2.err.uuid")
	s.Set(t, "order", "0 1 2 3")
	wantAllocatable(t, s.look(t), 3) // it has to prove itself
	s.clock.advance(5 * time.Minute)
	wantAllocatable(t, s.look(t), 4)
}

// TestGPU03Handle loses a GPU whose handle cannot even be had.
func TestGPU03Handle(t *testing.T) {
	s := newStack(t)
	s.look(t)
	s.Set(t, "order", "0 1 2 3", "gpu2.err.handle", "GPU_IS_LOST")
	inv := s.look(t)
	wantAllocatable(t, inv, 3)
	if d := device(t, inv, uuid2); d.Health.State != gpu.Lost {
		t.Errorf("health of the lost one: %+v", d.Health)
	}
}

// TestGPU03Renumbered loses a GPU at the index where another one was: no device is listed twice, none is forgotten.
func TestGPU03Renumbered(t *testing.T) {
	s := newStack(t)
	s.look(t)
	s.Set(t, "order", "1 0 2 3", "gpu0.err.handle", "UNKNOWN")
	inv := s.look(t)
	wantAllocatable(t, inv, 3)
	seen := map[string]int{}
	for _, d := range inv.Devices {
		seen[d.UUID]++
	}
	if seen[uuid1] != 1 || seen[uuid0] != 1 || len(inv.Devices) != 4 {
		t.Errorf("listed: %v", seen)
	}
	if d := device(t, inv, uuid0); d.Health.State == gpu.Healthy {
		t.Errorf("health of the one without a handle: %+v", d.Health)
	}
}

// TestHang is R-21: a GPU whose calls hang is failed, and the others go on.
func TestHang(t *testing.T) {
	for _, call := range []string{"all", "handle", "uuid", "memory", "compute"} {
		t.Run(call, func(t *testing.T) {
			s := testlib.NewScenario(t)
			t.Setenv(testlib.Env, s.Path)
			clock := newClock()
			src := New(Config{Library: testlib.Build(t), Now: clock.Now, Limit: 100 * time.Millisecond})
			wantAllocatable(t, inventoryOf(t, src), 4)
			s.Set(t, "order", "0 1 2 3", "gpu1.hang", call, "gpu2.util", "77")
			inv := inventoryOf(t, src)
			wantAllocatable(t, inv, 3)
			d := device(t, inv, uuid1)
			if d.Health.State != gpu.Failed {
				t.Errorf("health of the hanging one: %+v", d.Health)
			}
			wantText(t, d.Health.Reason, "no answer", "100ms")
			samples := samplesOf(t, src)
			if v := samples[uuid2].UtilisationPct; v.Value != 77 || v.State != gpu.Fresh {
				t.Errorf("utilisation of another: %+v", v)
			}
			if call == "all" && samples[uuid1].UtilisationPct.State != gpu.Missing {
				t.Errorf("the hanging one has utilisation %+v", samples[uuid1].UtilisationPct)
			}
			s.Unset(t, "gpu1.hang")
			deadline := time.Now().Add(10 * time.Second)
			for {
				clock.advance(time.Second)
				if len(inventoryOf(t, src).Allocatable()) == 4 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("it does not come back")
				}
			}
			if err := src.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestGPU04 is GPU-04 (NVIDIA/k8s-device-plugin#234, #1014): which XIDs take a GPU out, and how it comes back.
func TestGPU04(t *testing.T) {
	sample := func(t *testing.T, s *stack) {
		t.Helper()
		if _, err := s.src.Sample(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("classes", func(t *testing.T) {
		// The library hands each event of a process out once, and another test has had some: a process of its own.
		sc := testlib.NewScenario(t)
		p := start(t, testlib.Build(t), testlib.Env+"="+sc.Path)
		p.ask(t)
		for i, xid := range []int{13, 31, 43, 45, 69, 94, 48, 79} {
			sc.XID(t, i%4, xid)
		}
		var got []int
		for _, s := range p.ask(t).Samples {
			for _, f := range s.Faults {
				got = append(got, f.XID)
			}
		}
		slices.Sort(got)
		if want := []int{13, 31, 43, 45, 48, 69, 79, 94}; !slices.Equal(got, want) {
			t.Errorf("XIDs %v, want %v", got, want)
		}
		for _, xid := range []int{13, 31, 43, 45, 69, 94} {
			if gpu.ClassifyXID(xid) != gpu.XIDApplication {
				t.Errorf("XID %d takes the GPU out", xid)
			}
		}
		for _, xid := range []int{48, 79} {
			if gpu.ClassifyXID(xid) != gpu.XIDDevice {
				t.Errorf("XID %d does not take the GPU out", xid)
			}
		}
		if gpu.ClassifyXID(4711) != gpu.XIDUnknown {
			t.Error("XID 4711 is known")
		}
	})
	t.Run("out and back", func(t *testing.T) {
		s := newStack(t)
		wantAllocatable(t, s.look(t), 4)
		s.XID(t, 0, 31)
		s.XID(t, 1, 79)
		s.XID(t, 2, 4711)
		sample(t, s)
		inv := s.look(t)
		wantAllocatable(t, inv, 3)
		wantText(t, device(t, inv, uuid1).Health.Reason, "XID 79")
		if d := device(t, inv, uuid0); d.Health.LastXID != 31 {
			t.Errorf("last XID of the first GPU: %+v", d.Health)
		}
		s.restart(t)
		wantAllocatable(t, s.look(t), 3)
		s.clock.advance(5*time.Minute - 2*time.Second)
		wantAllocatable(t, s.look(t), 3)
		s.clock.advance(time.Second)
		wantAllocatable(t, s.look(t), 4)
		if r := device(t, s.look(t), uuid1).Health; r.Reason != "" || !r.Since.IsZero() {
			t.Errorf("health after recovery: %+v", r)
		}
	})
	t.Run("a recovery action keeps it out over restarts", func(t *testing.T) {
		s := newStack(t, "order", "0 1 2 3", "gpu3.recovery", "1")
		wantAllocatable(t, s.look(t), 3)
		for range 3 {
			s.restart(t)
			s.clock.advance(time.Hour)
			inv := s.look(t)
			wantAllocatable(t, inv, 3)
			wantText(t, device(t, inv, uuid3).Health.Reason, "reset the GPU")
		}
		s.Set(t, "gpu3.recovery", "0")
		wantAllocatable(t, s.look(t), 3)
		s.clock.advance(5 * time.Minute)
		wantAllocatable(t, s.look(t), 4)
	})
}

// TestGPU07 is GPU-07 (ollama/ollama#7429): the order changes and a card is added in front.
func TestGPU07(t *testing.T) {
	s := newStack(t, "gpu0.name", "NVIDIA GeForce RTX 4090", "gpu1.name", "NVIDIA L4", "gpu2.name", "NVIDIA A100-SXM4-80GB",
		"gpu3.name", "Tesla T4", "gpu1.util", "91")
	before := s.look(t)
	s.restart(t)
	s.Set(t, "gpu4.name", "NVIDIA H100 80GB HBM3", "order", "4 3 2 1 0")
	after := s.look(t)
	wantAllocatable(t, after, 5)
	for _, d := range before.Devices {
		if now := device(t, after, d.UUID); now.Model != d.Model || now.PCIBusID != d.PCIBusID {
			t.Errorf("%s was %s and is %s", d.UUID, d.Model, now.Model)
		}
	}
	if v := samplesOf(t, s.src)[uuid1].UtilisationPct.Value; v != 91 {
		t.Errorf("utilisation of the L4 is %v", v)
	}
}

// TestGPU15 is GPU-15 (NVIDIA/k8s-device-plugin PR#1899): both forms of MIG ids, and the driver's own error.
func TestGPU15(t *testing.T) {
	opaque := "MIG-30d00c09-0000-4000-8000-000000000001"
	old := "MIG-" + uuid0 + "/7/0"
	s := newStack(t, "gpu0.mig", "on", "gpu0.mig0", opaque+" 1g.10gb 9728", "gpu0.mig1", old+" 1g.10gb 9728 gi=7 ci=0 by_uuid=INVALID_ARGUMENT")
	inv := s.look(t)
	wantAllocatable(t, inv, 2)
	for _, id := range []string{opaque, old} {
		if d := device(t, inv, id); d.Kind != gpu.KindMIGInstance || d.Parent != uuid0 {
			t.Errorf("%+v", d)
		}
	}
	s.Set(t, "gpu0.mig0", opaque+" 1g.10gb 9728 by_uuid=NO_PERMISSION")
	inv = s.look(t)
	wantAllocatable(t, inv, 1)
	_, reason := gpu.Allocatable(device(t, inv, opaque))
	wantText(t, reason, "NO_PERMISSION", opaque)
}

func slices7(profile string) []string {
	var pairs []string
	for i := range 7 {
		pairs = append(pairs, fmt.Sprintf("gpu0.mig%d", i), fmt.Sprintf("MIG-30d00c09-0000-4000-8000-%012d %s 9728", i, profile))
	}
	return pairs
}

func keysOf(pairs []string) []string {
	var keys []string
	for i := 0; i < len(pairs); i += 2 {
		keys = append(keys, pairs[i])
	}
	return keys
}

// TestGPU16 is GPU-16 (NVIDIA/k8s-device-plugin#240): the MIG layout changes.
func TestGPU16(t *testing.T) {
	s := newStack(t, "gpu0.mig", "off", "gpu1.mig", "off")
	held := "MIG-30d00c09-0000-4000-8000-000000000003"
	wantAllocatable(t, s.look(t), 2)

	seven := slices7("1g.10gb")
	s.Set(t, append(seven, "gpu0.mig", "on")...)
	inv := s.look(t)
	wantAllocatable(t, inv, 8)
	if ok, reason := gpu.Leased(inv, held); !ok {
		t.Error(reason)
	}
	if ok, reason := gpu.Leased(inv, uuid0); ok || !strings.Contains(reason, "MIG mode") {
		t.Errorf("the lease of the whole GPU: %v %q", ok, reason)
	}

	s.Unset(t, keysOf(seven)...)
	s.Set(t, "gpu0.mig0", "MIG-40d00c09-0000-4000-8000-000000000001 3g.40gb 40192",
		"gpu0.mig1", "MIG-40d00c09-0000-4000-8000-000000000002 3g.40gb 40192")
	inv = s.look(t)
	wantAllocatable(t, inv, 3)
	if _, there := inv.Find(held); there {
		t.Error("a vanished instance is still listed")
	}
	ok, reason := gpu.Leased(inv, held)
	if ok {
		t.Error("the holder of a vanished instance is not flagged")
	}
	wantText(t, reason, held, "no longer exists")

	s.Unset(t, "gpu0.mig0", "gpu0.mig1")
	s.Set(t, "gpu0.mig", "off")
	inv = s.look(t)
	wantAllocatable(t, inv, 2)
	if len(inv.Devices) != 2 {
		t.Errorf("%d devices", len(inv.Devices))
	}
}

// TestGPU17 is GPU-17 (nebuly-ai/nos#25): MIG mode without instances, then with a GPU instance but no compute instance.
func TestGPU17(t *testing.T) {
	s := newStack(t, "gpu0.mig", "on", "gpu1.mig", "off", "gpu2.util", "0")
	for _, layout := range [][]string{nil, {"gpu0.mig3", ""}} { // a slot without an id has no compute instance
		if layout != nil {
			s.Set(t, layout...)
		}
		inv := s.look(t)
		wantAllocatable(t, inv, 2)
		_, reason := gpu.Allocatable(device(t, inv, uuid0))
		wantText(t, reason, "MIG on, nothing to allocate")
	}
}

// TestGPU18 is GPU-18 (NVIDIA/k8s-device-plugin#225): after a reboot MIG mode is there and the instances are not.
func TestGPU18(t *testing.T) {
	held := "MIG-30d00c09-0000-4000-8000-000000000001"
	s := newStack(t, "gpu0.mig", "on", "gpu0.mig0", held+" 1g.10gb 9728")
	wantAllocatable(t, s.look(t), 1)
	s.restart(t)
	s.Unset(t, "gpu0.mig0")
	inv := s.look(t)
	wantAllocatable(t, inv, 0)
	ok, reason := gpu.Leased(inv, held)
	if ok {
		t.Error("the lease on a dead MIG id is not flagged")
	}
	wantText(t, reason, "assigned device", "no longer exists")
}

// TestGPU19 is GPU-19 (gpustack/gpustack#6044): a compute process that is not ours, next to an Xorg and one of ours.
func TestGPU19(t *testing.T) {
	s := newStack(t, "gpu0.compute", "4242:30720", "gpu1.graphics", "1200:350", "gpu2.compute", "500:20480",
		"gpu3.compute", "77", "gpu3.graphics", "77:10")
	inv := s.look(t)
	wantAllocatable(t, inv, 2)
	_, reason := gpu.Allocatable(device(t, inv, uuid0))
	wantText(t, reason, "pid 4242", "p4242", "30720 MiB")
	if _, reason = gpu.Allocatable(device(t, inv, uuid3)); reason == "" {
		t.Error("a process in both lists blocks nothing")
	}
	x := device(t, inv, uuid1)
	if x.UsableMiB() != 24564-350 || len(x.Processes) != 1 || x.Processes[0].Name != "p1200" {
		t.Errorf("the desktop's GPU: %d MiB usable, %+v", x.UsableMiB(), x.Processes)
	}
	if p := samplesOf(t, s.src)[uuid2].Processes; len(p) != 1 || p[0].Workspace != "w1" || p[0].Name != "train.py" {
		t.Errorf("processes of the leased GPU: %+v", p)
	}
	s.Unset(t, "gpu0.compute")
	s.Set(t, "gpu0.util", "0")
	wantAllocatable(t, s.look(t), 3)
}

// TestGPU20 is GPU-20 (NVIDIA/gpu-monitoring-tools#141): what a card does not offer, and a value that fails later.
func TestGPU20(t *testing.T) {
	s := newStack(t, "gpu0.util", "40", "gpu0.memory_used", "1000", "gpu1.err.utilization", "NOT_SUPPORTED",
		"gpu1.err.power", "NOT_SUPPORTED", "gpu1.temp", "44")
	wantAllocatable(t, s.look(t), 2)
	one := samplesOf(t, s.src)[uuid1]
	if one.UtilisationPct.State != gpu.Unsupported || one.PowerW.State != gpu.Unsupported || one.TemperatureC.Value != 44 {
		t.Errorf("%+v", one)
	}
	readAt := s.clock.Now()
	s.clock.advance(time.Minute)
	s.Set(t, "gpu0.err.memory", "UNKNOWN", "gpu0.util", "41")
	zero := samplesOf(t, s.src)[uuid0]
	if m := zero.MemoryUsedMiB; m.State != gpu.Stale || m.Value != 1000 || !m.At.Equal(readAt) || m.Reason != "UNKNOWN" {
		t.Errorf("memory is %+v, want the value of %s, stale", m, readAt)
	}
	if u := zero.UtilisationPct; u.State != gpu.Fresh || u.Value != 41 {
		t.Errorf("utilisation is %+v", u)
	}
	inv := s.look(t)
	wantAllocatable(t, inv, 2)
	if m := device(t, inv, uuid0).MemoryMiB; m != 24564 {
		t.Errorf("the GPU has %d MiB", m)
	}
	s.clock.advance(5 * time.Minute)
	if m := samplesOf(t, s.src)[uuid0].MemoryUsedMiB; m.State != gpu.Missing || m.Value != 0 {
		t.Errorf("memory after the time that stale values are kept: %+v", m)
	}
	s.Unset(t, "gpu0.err.memory")
	if m := samplesOf(t, s.src)[uuid0].MemoryUsedMiB; m.State != gpu.Fresh {
		t.Errorf("memory is %+v", m)
	}
}

// TestGPU21 is GPU-21 (gpustack/gpustack#6054): a slice's memory is NVML's figure and its name only a label.
func TestGPU21(t *testing.T) {
	s := newStack(t, "gpu0.name", "NVIDIA A100-SXM4-80GB", "gpu0.memory_total", "81920", "gpu0.mig", "on",
		"gpu0.mig0", "MIG-a 1g.10gb 9728 used=12 compute=500:2000", "gpu0.mig1", "MIG-b 1g.5gb+me 4864", "gpu0.mig2", "MIG-c 2g.20gb 19968")
	inv := s.look(t)
	for id, want := range map[string]struct {
		profile, key string
		mib          int64
	}{
		"MIG-a": {"1g.10gb", "A100-80GB/1g.10gb", 9728},
		"MIG-b": {"1g.5gb+me", "A100-80GB/1g.5gb+me", 4864},
		"MIG-c": {"2g.20gb", "A100-80GB/2g.20gb", 19968},
	} {
		if d := device(t, inv, id); d.Profile != want.profile || d.ModelKey != want.key || d.MemoryMiB != want.mib {
			t.Errorf("%s: %q %q %d MiB", id, d.Profile, d.ModelKey, d.MemoryMiB)
		}
	}
	a := samplesOf(t, s.src)["MIG-a"]
	if a.MemoryUsedMiB.Value != 12 || a.UtilisationPct.State != gpu.Unsupported || len(a.Processes) != 1 || a.Processes[0].Workspace != "w1" {
		t.Errorf("%+v", a)
	}
}

// TestMIGPending keeps a GPU back whose mode change waits for a reset.
func TestMIGPending(t *testing.T) {
	s := newStack(t, "gpu0.mig", "off", "gpu0.mig_pending", "on")
	inv := s.look(t)
	wantAllocatable(t, inv, 0)
	_, reason := gpu.Allocatable(inv.Devices[0])
	wantText(t, reason, "MIG mode change")
}
