//go:build cgo && linux

package nvml

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carrel-dev/carrel/agent/gpu"
	"github.com/carrel-dev/carrel/agent/nvml/testlib"
)

// helperEnv names the library for a process of its own: the loader keeps libraries for the life of a process.
const helperEnv = "CARREL_NVML_TEST_HELPER"

func TestMain(m *testing.M) {
	if library, ok := os.LookupEnv(helperEnv); ok {
		if err := helper(library, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// helper answers each line with an inventory and samples, as JSON on one line.
func helper(library string, in io.Reader, out io.Writer) error {
	ctx := context.Background()
	src := New(Config{Library: library, Now: time.Now})
	enc := json.NewEncoder(out)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var a answer
		var err error
		if a.Inventory, err = src.Inventory(ctx); err != nil {
			return err
		}
		if a.Samples, err = src.Sample(ctx); err != nil {
			return err
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
	return src.Close()
}

type answer struct {
	Inventory gpu.Inventory
	Samples   []gpu.Sample
}

// process is a helper process.
type process struct {
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(t *testing.T, library string, env ...string) *process {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), helperEnv+"="+library), env...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &process{in: in, out: bufio.NewScanner(out)}
	p.out.Buffer(nil, 1<<20)
	t.Cleanup(func() {
		if err := in.Close(); err != nil {
			t.Error(err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("the process that asks the library: %v", err)
		}
	})
	return p
}

func (p *process) ask(t *testing.T) answer {
	t.Helper()
	if _, err := io.WriteString(p.in, "\n"); err != nil {
		t.Fatal(err)
	}
	if !p.out.Scan() {
		t.Fatalf("the process ended: %v", p.out.Err())
	}
	var a answer
	if err := json.Unmarshal(p.out.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	return a
}

// clock is a clock that tests turn.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2025, 3, 1, 12, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// host is a source on the test library in this process.
type host struct {
	gpu.Source
	*testlib.Scenario
	clock *clock
}

func newHost(t *testing.T, pairs ...string) *host {
	t.Helper()
	h := &host{Scenario: testlib.NewScenario(t, pairs...), clock: newClock()}
	t.Setenv(testlib.Env, h.Path)
	h.Source = New(Config{Library: testlib.Build(t), Now: h.clock.Now, Limit: 5 * time.Second})
	src := h.Source
	t.Cleanup(func() {
		if err := src.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func inventoryOf(t *testing.T, src gpu.Source) gpu.Inventory {
	t.Helper()
	inv, err := src.Inventory(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return inv
}

func samplesOf(t *testing.T, src gpu.Source) map[string]gpu.Sample {
	t.Helper()
	list, err := src.Sample(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]gpu.Sample{}
	for _, s := range list {
		out[s.UUID] = s
	}
	return out
}

func device(t *testing.T, inv gpu.Inventory, uuid string) gpu.Device {
	t.Helper()
	d, ok := inv.Find(uuid)
	if !ok {
		t.Fatalf("no device %s in %+v", uuid, inv)
	}
	return d
}

func wantAllocatable(t *testing.T, inv gpu.Inventory, want int) {
	t.Helper()
	got := inv.Allocatable()
	if len(got) == want {
		return
	}
	t.Errorf("%d devices can be given out, want %d; problem %q", len(got), want, inv.Problem)
	for _, d := range inv.Devices {
		_, reason := gpu.Allocatable(d)
		t.Logf("%s %s: %s", d.UUID, d.Kind, reason)
	}
}

func wantText(t *testing.T, got string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(got, w) {
			t.Errorf("%q does not say %q", got, w)
		}
	}
}

const (
	uuid0 = "GPU-00000000-0000-4000-8000-000000000000"
	uuid1 = "GPU-00000001-0000-4000-8000-000000000001"
	uuid2 = "GPU-00000002-0000-4000-8000-000000000002"
	uuid3 = "GPU-00000003-0000-4000-8000-000000000003"
)

func copyFile(t *testing.T, to, from string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(to+".new", b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(to+".new", to); err != nil {
		t.Fatal(err)
	}
}

// TestGPU01 is GPU-01 (NVIDIA/go-nvml#82): no library, only libnvidia-ml.so.1, and an init that fails.
func TestGPU01(t *testing.T) {
	t.Run("no library", func(t *testing.T) {
		a := start(t, "libcarrel-there-is-none.so.1").ask(t)
		wantText(t, a.Inventory.Problem, "no NVIDIA driver library", "libcarrel-there-is-none.so.1", "cannot open shared object")
		wantAllocatable(t, a.Inventory, 0)
	})
	t.Run("a file that is no library", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
		if err := os.WriteFile(path, []byte("text\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		wantText(t, start(t, path).ask(t).Inventory.Problem, path, "file too short")
	})
	t.Run("a library of something else", func(t *testing.T) {
		wantText(t, start(t, "libm.so.6").ask(t).Inventory.Problem, "no NVML library")
	})
	t.Run("only libnvidia-ml.so.1 on the search path", func(t *testing.T) {
		dir := t.TempDir()
		copyFile(t, filepath.Join(dir, "libnvidia-ml.so.1"), testlib.Build(t))
		a := start(t, "", "LD_LIBRARY_PATH="+dir, testlib.Env+"="+testlib.NewScenario(t).Path).ask(t)
		wantAllocatable(t, a.Inventory, 4)
		if a.Inventory.DriverVersion != "550.54.15" || a.Inventory.CUDAVersion != "12.4" || len(a.Samples) != 4 {
			t.Errorf("%+v", a)
		}
	})
	t.Run("init fails, and then works", func(t *testing.T) {
		s := testlib.NewScenario(t)
		p := start(t, testlib.Build(t), testlib.Env+"="+s.Path)
		for _, code := range []string{"DRIVER_NOT_LOADED", "LIB_RM_VERSION_MISMATCH", "UNKNOWN"} {
			s.Set(t, "init", code)
			inv := p.ask(t).Inventory
			wantText(t, inv.Problem, code)
			wantAllocatable(t, inv, 0)
		}
		s.Unset(t, "init")
		wantAllocatable(t, p.ask(t).Inventory, 4)
	})
}

// TestGPU12 is GPU-12 (dstackai/dstack#1465): the driver appears, and vanishes, after the agent started.
func TestGPU12(t *testing.T) {
	t.Run("the library comes, is replaced, goes and comes back", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
		s := testlib.NewScenario(t)
		p := start(t, path, testlib.Env+"="+s.Path)
		wantText(t, p.ask(t).Inventory.Problem, "no NVIDIA driver library")
		copyFile(t, path, testlib.Build(t, "nvmlInit_v2", "nvmlInit"))
		wantText(t, p.ask(t).Inventory.Problem, "no NVML library")
		s.Set(t, "init", "DRIVER_NOT_LOADED")
		copyFile(t, path, testlib.Build(t, "nvmlDeviceGetUUID"))
		wantText(t, p.ask(t).Inventory.Problem, "DRIVER_NOT_LOADED")
		s.Unset(t, "init")
		copyFile(t, path, testlib.Build(t))
		wantAllocatable(t, p.ask(t).Inventory, 4)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			inv := p.ask(t).Inventory
			wantText(t, inv.Problem, path, "removed")
			wantAllocatable(t, inv, 0)
		}
		copyFile(t, path, testlib.Build(t))
		wantAllocatable(t, p.ask(t).Inventory, 4)
	})
	t.Run("a library replaced under the agent asks for a restart", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
		copyFile(t, path, testlib.Build(t))
		s := testlib.NewScenario(t)
		p := start(t, path, testlib.Env+"="+s.Path)
		wantAllocatable(t, p.ask(t).Inventory, 4)
		copyFile(t, path, testlib.Build(t))
		s.Set(t, "init", "LIB_RM_VERSION_MISMATCH")
		inv := p.ask(t).Inventory
		wantText(t, inv.Problem, "LIB_RM_VERSION_MISMATCH", "restart the agent")
		if !inv.RestartNeeded {
			t.Error("no restart asked for")
		}
	})
	t.Run("the kernel module goes and comes back", func(t *testing.T) {
		h := newHost(t, "gpu0.name", "NVIDIA GeForce RTX 4090", "gpu1.name", "NVIDIA A100-SXM4-80GB")
		_, src, err := gpu.Stack(h.Source, gpu.StackConfig{Now: h.clock.Now, InventoryTTL: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		wantAllocatable(t, inventoryOf(t, src), 2)
		h.Set(t, "init", "DRIVER_NOT_LOADED")
		h.clock.advance(time.Second)
		inv := inventoryOf(t, src)
		wantText(t, inv.Problem, "DRIVER_NOT_LOADED", "load the kernel module nvidia")
		wantAllocatable(t, inv, 0)
		ok, reason := gpu.Leased(inv, uuid1)
		if ok {
			t.Error("a lease on a vanished GPU is not flagged")
		}
		wantText(t, reason, uuid1, "lost", "DRIVER_NOT_LOADED")
		h.Unset(t, "init")
		h.clock.advance(time.Second)
		wantAllocatable(t, inventoryOf(t, src), 2)
	})
}

// TestOldLibrary asks one that lacks each optional symbol in turn; a call to a missing one would end the process.
func TestOldLibrary(t *testing.T) {
	optional := []string{
		"nvmlSystemGetDriverVersion", "nvmlSystemGetCudaDriverVersion", "nvmlDeviceGetHandleByUUID",
		"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfo", "nvmlDeviceGetCudaComputeCapability",
		"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
		"nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetUtilizationRates",
		"nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetComputeRunningProcesses_v3",
		"nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetFieldValues", "nvmlEventSetCreate",
		"nvmlEventSetWait_v2", "nvmlEventSetWait", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSupportedEventTypes",
		"nvmlErrorString", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlInit_v2",
	}
	s := testlib.NewScenario(t, "gpu0.mig", "off", "gpu1.mig", "on", "gpu1.mig0", "MIG-30d00c09-0000-4000-8000-000000000001 1g.10gb 9728")
	path := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	copyFile(t, path, testlib.Build(t, optional...))
	a := start(t, path, testlib.Env+"="+s.Path).ask(t)
	if len(a.Inventory.Devices) != 2 || len(a.Samples) != 2 {
		t.Fatalf("%+v", a)
	}
	if m := a.Samples[0].UtilisationPct; m.State != gpu.Unsupported {
		t.Errorf("utilisation is %+v", m)
	}
	copyFile(t, path, testlib.Build(t, "nvmlDeviceGetUUID"))
	wantText(t, start(t, path, testlib.Env+"="+s.Path).ask(t).Inventory.Problem, "lacks nvmlDeviceGetUUID")
}
