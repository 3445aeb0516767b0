package gpu_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/gpu/gputest"
)

func at(sec int64) func() time.Time { return func() time.Time { return time.Unix(sec, 0) } }

func simulated(t *testing.T, cfg gpu.SimulatedConfig) gpu.Source {
	t.Helper()
	if cfg.Now == nil {
		cfg.Now = at(1_000_000)
	}
	src, err := gpu.Simulated(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return src
}

func inventory(t *testing.T, src gpu.Source) gpu.Inventory {
	t.Helper()
	inv, err := src.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func TestContractSimulated(t *testing.T) {
	gputest.Contract(t, func(t *testing.T) gpu.Source {
		return simulated(t, gpu.SimulatedConfig{Host: "h1", Spec: "2xA100-80GB,1xH100"})
	})
	t.Run("stacked", func(t *testing.T) {
		gputest.Contract(t, func(t *testing.T) gpu.Source {
			_, src, err := gpu.Stack(simulated(t, gpu.SimulatedConfig{Host: "h1", Spec: "4x4090"}), gpu.StackConfig{
				Now: at(1_000_000), RuleOf: func(string) gpu.Rule { return gpu.RuleNone },
				OwnerOf: func(int) gpu.Owner { return gpu.Owner{} },
			})
			if err != nil {
				t.Fatal(err)
			}
			return src
		})
	})
}

func TestSimulatedIdentity(t *testing.T) {
	ids := func(host, spec string) []string {
		var out []string
		for _, d := range inventory(t, simulated(t, gpu.SimulatedConfig{Host: host, Spec: spec})).Devices {
			if !strings.HasPrefix(d.UUID, "SIM-") {
				t.Errorf("UUID %q", d.UUID)
			}
			out = append(out, d.UUID)
		}
		return out
	}
	first := ids("h1", "4x4090")
	if again := ids("h1", "4x4090"); !slices.Equal(first, again) {
		t.Errorf("%v after a restart, %v before", again, first)
	}
	if grown := ids("h1", "4x4090,1xH100"); !slices.Equal(first, grown[:4]) {
		t.Errorf("%v in a longer list, %v before", grown, first)
	}
	if other := ids("h2", "4x4090"); slices.Contains(other, first[0]) {
		t.Error("two hosts share a UUID")
	}
}

func TestSimulatedList(t *testing.T) {
	for spec, want := range map[string][]string{
		"":                   nil,
		"none":               nil,
		"4090":               {"4090"},
		"2xa100-80gb, 1xL4":  {"A100-80GB", "A100-80GB", "L4"},
		"1xV100-16GB,1x4090": {"V100-16GB", "4090"},
	} {
		var got []string
		for _, d := range inventory(t, simulated(t, gpu.SimulatedConfig{Spec: spec})).Devices {
			got = append(got, d.ModelKey)
			if key := gpu.ModelKey(d.Model, d.MemoryMiB); key != d.ModelKey {
				t.Errorf("%s: ModelKey(%q, %d) is %q", d.ModelKey, d.Model, d.MemoryMiB, key)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q gives %v, want %v", spec, got, want)
		}
	}
	for spec, want := range map[string]string{
		"4xRTX":          "unknown model \"RTX\"; known are",
		"-1x4090":        "count",
		"0x4090":         "count",
		"257x4090":       "1 to 256",
		"1000000x4090":   "1 to 256",
		"200x4090,99xL4": "more than 256",
		"4x4090,":        "empty part",
		"4x":             "unknown model",
		"x4090":          "unknown model",
	} {
		if _, err := gpu.Simulated(gpu.SimulatedConfig{Spec: spec}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", spec, err, want)
		}
	}
}

func TestEveryKnownModelHasItsOwnKey(t *testing.T) {
	for _, key := range gpu.KnownModels() {
		d := inventory(t, simulated(t, gpu.SimulatedConfig{Spec: key})).Devices[0]
		if got := gpu.ModelKey(d.Model, d.MemoryMiB); got != key {
			t.Errorf("ModelKey(%q, %d) is %q, want %q", d.Model, d.MemoryMiB, got, key)
		}
	}
}

func TestModelKey(t *testing.T) {
	for _, c := range []struct {
		name string
		mib  int64
		want string
	}{
		{"NVIDIA A100-SXM4-40GB", 40960, "A100-40GB"},
		{"NVIDIA A100-PCIE-40GB", 40960, "A100-40GB"},
		{"NVIDIA A100 80GB PCIe", 81920, "A100-80GB"},
		{"NVIDIA H100 PCIe", 81559, "H100"},
		{"NVIDIA H100 NVL", 95830, "H100-94GB"},
		{"NVIDIA H200", 143771, "H200"},
		{"Tesla V100-SXM2-32GB-LS", 32768, "V100-LS"},
		{"Tesla P100-PCIE-16GB", 16280, "P100-16GB"},
		{"NVIDIA GeForce RTX 3080 Ti", 12288, "3080Ti"},
		{"NVIDIA GeForce RTX 3080", 12288, "3080-12GB"},
		{"NVIDIA GeForce RTX 4070 Ti SUPER", 16376, "4070TiSuper"},
		{"NVIDIA GeForce RTX 4090 D", 24564, "4090D"},
		{"NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "4090-Laptop"},
		{"NVIDIA GeForce GTX 1660 SUPER", 6144, "1660Super"},
		{"Quadro RTX 8000", 49152, "RTX8000"},
		{"NVIDIA RTX A5000", 24564, "A5000"},
		{"NVIDIA RTX 4000 Ada Generation", 20475, "RTX4000-Ada"},
		{"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887, "RTXPRO6000-Blackwell-Workstation"},
		{"NVIDIA TITAN V", 12288, "TITAN-V"},
		{"", 0, "unknown"},
		{"Graphics Device", 1, "unknown"},
	} {
		if got := gpu.ModelKey(c.name, c.mib); got != c.want {
			t.Errorf("ModelKey(%q, %d) is %q, want %q", c.name, c.mib, got, c.want)
		}
	}
}

func TestSimulatedLoadOnlyWhenLeased(t *testing.T) {
	var leased string
	src := simulated(t, gpu.SimulatedConfig{Spec: "2x4090", Load: func(uuid string, now time.Time) (gpu.Load, bool) {
		return gpu.Wave(uuid, now), uuid == leased
	}})
	leased = inventory(t, src).Devices[1].UUID
	samples, err := src.Sample(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if s := samples[0]; s.UtilisationPct.Value != 0 || s.MemoryUsedMiB.Value != 0 {
		t.Errorf("without a lease: %+v", s)
	}
	if s := samples[1]; s.MemoryUsedMiB.Value <= 0 || s.MemoryUsedMiB.Value > 24564 || !s.Simulated {
		t.Errorf("with a lease: %+v", s)
	}
	busy, idle := 0, 0
	for sec := range int64(300) {
		l := gpu.Wave(leased, time.Unix(sec, 0))
		if l.UtilisationPct < 0 || l.UtilisationPct > 100 {
			t.Fatalf("second %d: %+v", sec, l)
		}
		if l.UtilisationPct > 0 {
			busy++
		} else {
			idle++
		}
	}
	if busy != 240 || idle != 60 {
		t.Errorf("%d s busy, %d s idle", busy, idle)
	}
}

func TestNull(t *testing.T) {
	inv := inventory(t, gpu.Null("turned off"))
	if inv.Source != gpu.SourceNone || inv.Problem != "turned off" || len(inv.Devices) != 0 {
		t.Errorf("%+v", inv)
	}
}

func TestContainerID(t *testing.T) {
	a, b := strings.Repeat("a1", 32), strings.Repeat("b2", 32)
	for name, c := range map[string]struct {
		file string
		want []string
	}{
		"v1 cgroupfs":           {"12:pids:/docker/" + a + "\n1:name=systemd:/docker/" + a + "\n", []string{a}},
		"v1, some controllers":  {"3:rdma:/\n2:devices:/docker/" + a + "\n0::/\n", []string{a}},
		"v2 cgroupfs":           {"0::/docker/" + a + "\n", []string{a}},
		"v2 systemd":            {"0::/system.slice/docker-" + a + ".scope\n", []string{a}},
		"own parent":            {"0::/carrel.slice/carrel-x.slice/docker-" + a + ".scope/init\n", []string{a}},
		"podman":                {"0::/machine.slice/libpod-" + a + ".scope/container", []string{a}},
		"containerd":            {"0::/kubepods.slice/kubepods-pod1.slice/cri-containerd-" + a + ".scope\n", []string{a}},
		"nested":                {"0::/docker/" + a + "/docker/" + b + "\n", []string{a, b}},
		"seen from a namespace": {"0::/../" + a + "\n", []string{a}},
		"no container":          {"0::/user.slice/user-1000.slice/session-3.scope\n", nil},
		"capitals are no id":    {"0::/docker/" + strings.ToUpper(a) + "\n", nil},
		"63 digits":             {"0::/docker/" + a[1:] + "\n", nil},
		"empty":                 {"", nil},
		"garbage":               {"\x00\xff:::\n::\n:", nil},
	} {
		if got := gpu.ContainerIDs([]byte(c.file)); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		id, ok := gpu.ContainerID([]byte(c.file))
		if ok != (len(c.want) > 0) || ok && id != c.want[0] {
			t.Errorf("%s: %q %v", name, id, ok)
		}
	}
}

func FuzzContainerIDs(f *testing.F) {
	f.Add("0::/docker/" + strings.Repeat("a1", 32))
	f.Fuzz(func(t *testing.T, file string) {
		for _, id := range gpu.ContainerIDs([]byte(file)) {
			if len(id) != 64 || strings.Trim(id, "0123456789abcdef") != "" || !strings.Contains(file, id) {
				t.Errorf("id %q", id)
			}
		}
	})
}

// fakeProc is a proc file system of two processes.
type fakeProc map[int]string

func (p fakeProc) Cgroup(pid int) ([]byte, error) {
	if c, ok := p[pid]; ok {
		return []byte(c), nil
	}
	return nil, errors.New("no such process")
}

func (p fakeProc) Name(pid int) (string, error) {
	if _, ok := p[pid]; ok {
		return "python3", nil
	}
	return "", errors.New("no such process")
}

func TestOwnersByContainer(t *testing.T) {
	ours, victim := strings.Repeat("a1", 32), strings.Repeat("b2", 32)
	owner := gpu.OwnersByContainer(fakeProc{
		1: "0::/docker/" + ours, 2: "0::/docker/" + ours + "/docker/" + victim, 3: "0::/docker/" + strings.Repeat("c3", 32),
		4: "0::/docker/" + strings.Repeat("c3", 32) + "/docker/" + ours,
	}, func(id string) (string, bool) {
		w, ok := map[string]string{ours: "w1", victim: "w2"}[id]
		return w, ok
	})
	for pid, want := range map[int]gpu.Owner{
		1: {Name: "python3", Workspace: "w1", Ours: true},
		2: {Name: "python3", Workspace: "w1", Ours: true}, // a cgroup named after another's container changes nothing
		3: {Name: "python3"},
		4: {Name: "python3", Workspace: "w1", Ours: true}, // the engine itself runs in a container
		5: {},
	} {
		if got := owner(pid); got != want {
			t.Errorf("pid %d: %+v, want %+v", pid, got, want)
		}
	}
}

func TestRules(t *testing.T) {
	src := simulated(t, gpu.SimulatedConfig{Spec: "2x4090"})
	out := inventory(t, src).Devices[0].UUID
	inv := inventory(t, gpu.Ruled(src, func(uuid string) gpu.Rule {
		if uuid == out {
			return gpu.RuleExclude
		}
		return gpu.RuleInclude
	}))
	if ok, reason := gpu.Allocatable(inv.Devices[0]); ok || reason != "excluded by an admin" {
		t.Errorf("%v %q", ok, reason)
	}
	foreign := inv.Devices[1]
	foreign.ForeignProcesses = []gpu.Process{{PID: 1, Type: gpu.Compute, MemoryMiB: gpu.MemoryUnknown}}
	if ok, reason := gpu.Allocatable(foreign); !ok {
		t.Error(reason)
	}
	foreign.ForeignAllowed = false
	if _, reason := gpu.Allocatable(foreign); reason != "in use outside Carrel: pid 1" {
		t.Errorf("%q", reason)
	}
}

// counting counts how often a source is asked.
type counting struct {
	gpu.Source
	asked int
	wait  chan struct{}
}

func (c *counting) Inventory(ctx context.Context) (gpu.Inventory, error) {
	c.asked++
	if c.wait != nil {
		<-c.wait
	}
	return c.Source.Inventory(ctx)
}

func TestCachedSharesOneLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &counting{Source: simulated(t, gpu.SimulatedConfig{Spec: "1x4090"}), wait: make(chan struct{})}
		src := gpu.Cached(c, 10*time.Second, time.Now)
		done := make(chan error, 5)
		for range 5 {
			go func() {
				_, err := src.Inventory(t.Context())
				done <- err
			}()
		}
		synctest.Wait()
		close(c.wait)
		for range 5 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if c.asked != 1 {
			t.Errorf("asked %d times", c.asked)
		}
		time.Sleep(10 * time.Second) //nolint:forbidigo // the bubble's clock
		if _, err := src.Inventory(t.Context()); err != nil || c.asked != 2 {
			t.Errorf("asked %d times, %v", c.asked, err)
		}
	})
}

// stuck is a driver with two GPUs of which one never answers.
type stuck struct {
	gpu.Driver
	release chan struct{}
	calls   atomic.Int32
}

func (s *stuck) Kind() gpu.SourceKind    { return gpu.SourceNVML }
func (s *stuck) Host() (gpu.Host, error) { return gpu.Host{Count: 2}, nil }
func (s *stuck) Device(i int) ([]gpu.Device, error) {
	if i == 1 {
		s.calls.Add(1)
		<-s.release
	}
	return []gpu.Device{{UUID: []string{"GPU-a", "GPU-b"}[i], Index: i, Kind: gpu.KindGPU, Health: gpu.Health{State: gpu.Healthy}}}, nil
}

func TestIsolateAsksAHangingDeviceOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &stuck{release: make(chan struct{})}
		src := gpu.Isolate(d, gpu.IsolateConfig{Now: time.Now})
		start := time.Now()
		for i := range 10 {
			inv := inventory(t, src)
			if len(inv.Allocatable()) != 1 || !strings.Contains(inv.Problem, "GPU 1 cannot be identified") {
				t.Fatalf("look %d: %+v", i, inv)
			}
		}
		if took := time.Since(start); took != gpu.DefaultDeviceLimit {
			t.Errorf("ten looks took %s, want the limit once", took)
		}
		if n := d.calls.Load(); n != 1 {
			t.Errorf("asked %d times while the first question was open", n)
		}
		close(d.release)
		synctest.Wait()
		if inv := inventory(t, src); len(inv.Allocatable()) != 2 || inv.Problem != "" {
			t.Errorf("after it answered: %+v", inv)
		}
	})
}

func TestLoadErrorOfRecords(t *testing.T) {
	_, err := gpu.Watch(gpu.Null(""), gpu.HealthConfig{Store: brokenStore{}, Now: time.Now})
	if err == nil || !strings.Contains(err.Error(), "device health records") {
		t.Error(err)
	}
}

type brokenStore struct{}

func (brokenStore) Load() ([]gpu.HealthRecord, error) { return nil, errors.New("disk") }
func (brokenStore) Save([]gpu.HealthRecord) error     { return errors.New("disk") }
