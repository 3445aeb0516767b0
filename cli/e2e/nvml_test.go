package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	dockertypes "github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"

	"github.com/carrel-dev/carrel/agent/docker/dockertest"
	"github.com/carrel-dev/carrel/agent/nvml/testlib"
)

// gpu is what `gpus -o json` says of a device, as far as tests look at it.
type gpu struct {
	ID           string    `json:"id"`
	Index        int       `json:"index"`
	Product      string    `json:"product"`
	Model        string    `json:"model"`
	MemoryMiB    int64     `json:"memory_mib"`
	Capability   string    `json:"compute_capability"`
	Kind         string    `json:"kind"`
	Parent       string    `json:"parent"`
	Simulated    bool      `json:"simulated"`
	Health       string    `json:"health"`
	HealthReason string    `json:"health_reason"`
	Free         bool      `json:"free"`
	Workspace    string    `json:"workspace"`
	User         string    `json:"user"`
	Processes    []gpuUser `json:"processes"`
}

type gpuUser struct {
	PID       int    `json:"pid"`
	Name      string `json:"name"`
	MemoryMiB int64  `json:"memory_mib"`
	Graphics  bool   `json:"graphics"`
	Workspace string `json:"workspace"`
	User      string `json:"user"`
}

// gpus returns the devices by id.
func (p *person) gpus() map[string]gpu {
	p.l.t.Helper()
	var list []gpu
	out := p.ok("gpus", "-o", "json")
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		p.l.t.Fatalf("gpus: %v\n%s", err, out)
	}
	all := map[string]gpu{}
	for _, g := range list {
		all[g.ID] = g
	}
	return all
}

// problems returns what `host ls` says is wrong with the host.
func (p *person) problems() string {
	p.l.t.Helper()
	var hosts []struct{ Problems []string }
	out := p.ok("host", "ls", "-o", "json")
	if err := json.Unmarshal([]byte(out), &hosts); err != nil || len(hosts) != 1 {
		p.l.t.Fatalf("host ls: %v\n%s", err, out)
	}
	return strings.Join(hosts[0].Problems, "\n")
}

// UUIDs of the test library's devices.
const (
	desktopGPU = "GPU-00000000-1111-4000-8000-000000000000" // an Xorg is on it
	splitGPU   = "GPU-11111111-1111-4000-8000-000000000000" // in MIG mode
	takenGPU   = "GPU-22222222-1111-4000-8000-000000000000" // somebody computes on it
	idleGPU    = "GPU-33333333-1111-4000-8000-000000000000"
	smallSlice = "MIG-44444444-1111-4000-8000-000000000000"
	largeSlice = "MIG-55555555-1111-4000-8000-000000000000"
)

// startNVMLAgent joins an agent whose devices are the scenario's, on the given engine.
func (l *lab) startNVMLAgent(scenario *testlib.Scenario, library, engine string, flags ...string) {
	l.t.Helper()
	l.env = append(l.env, testlib.Env+"="+scenario.Path)
	l.startAgent(strings.TrimSpace(l.admin.ok("host", "token")), append([]string{
		"--gpus", "nvml", "--nvml-library", library, "--engine-host", engine, "--times-facts", "500ms", "--gpu-inventory-age", "500ms",
	}, flags...)...)
	l.eventually("the host is ready", func() bool {
		return strings.Contains(l.admin.ok("host", "ls", "-o", "json"), `"ready"`)
	})
}

// gpuEngine starts an engine of the test's own that hands out GPUs, with the test image.
func gpuEngine(t *testing.T) *dockertest.Engine {
	t.Helper()
	system, err := client.NewClientWithOpts(client.WithHost("unix:///var/run/docker.sock"), client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = system.Close() }()
	e := dockertest.Start(t, "{}")
	e.Load(system, testImage)
	return e
}

// program runs a process on the host, beside all workspaces, under a name.
func program(t *testing.T, name string) (pid int) {
	t.Helper()
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), name)
	text, err := os.ReadFile(sleep)
	if err == nil {
		err = os.WriteFile(path, text, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), path, "3600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// fourGPUs are an A100 in MIG mode and three 4090, one under a desktop and one in somebody's use.
func fourGPUs(t *testing.T, xorg, train int) *testlib.Scenario {
	t.Helper()
	return testlib.NewScenario(
		t, "driver", "550.54.15", "cuda", "12040",
		"gpu0.uuid", desktopGPU, "gpu0.graphics", fmt.Sprintf("%d:300", xorg), "gpu0.memory_used", "304",
		"gpu1.uuid", splitGPU, "gpu1.name", "NVIDIA A100-SXM4-80GB", "gpu1.memory_total", "81920", "gpu1.cc", "8.0", "gpu1.mig", "on",
		"gpu1.mig0", smallSlice+" 1g.10gb 9728", "gpu1.mig1", largeSlice+" 3g.40gb 40192",
		"gpu2.uuid", takenGPU, "gpu2.compute", fmt.Sprintf("%d:10240", train), "gpu2.memory_used", "10244",
		"gpu3.uuid", idleGPU,
	)
}

// TestNVMLDevicesReachTheirWorkspaces is the path from the driver to a container: what is there is shown as it is, what others use is
// not given out, and a workspace gets its lease's devices and no more (GPU-06, GPU-09, GPU-13, GPU-19, GPU-21).
func TestNVMLDevicesReachTheirWorkspaces(t *testing.T) {
	t.Parallel()
	engine := gpuEngine(t)
	const greedy = "carrel/greedy:local"
	engine.Derive(testImage, greedy, "ENV NVIDIA_VISIBLE_DEVICES=all", "ENV NVIDIA_DRIVER_CAPABILITIES=all")
	xorg, train := program(t, "Xorg"), program(t, "train")
	scenario := fourGPUs(t, xorg, train)
	l := newBareLab(t, "--samples-interval", "500ms")
	l.startNVMLAgent(scenario, testlib.Build(t), engine.Host)
	ana := l.addUser("ana")

	checkInventory(t, l, xorg, train)

	// The agent tries the engine out with a device first.
	l.eventually("the hook was tried", func() bool { return engine.Seen() != "" })
	engine.Forget()
	ana.ok("up", "one", "--gpu", "4090", "-q")
	one := ana.show("one").Devices[0].ID
	if one != desktopGPU && one != idleGPU {
		t.Errorf("one got %s", one)
	}
	if got := engine.Seen(); got != "NVIDIA_VISIBLE_DEVICES="+one+"\n" {
		t.Errorf("one leases %s; the hook saw %q", one, got)
	}
	wantEnv(t, ana, "one", "NVIDIA_VISIBLE_DEVICES="+one, "CARREL_DEVICES="+one, "CARREL_GPU_COUNT=1")
	checkTop(t, l, engine, scenario, ana)

	engine.Forget()
	ana.ok("up", "none", "--gpu", "0", "--image", greedy, "-q")
	wantEnv(t, ana, "none", "NVIDIA_VISIBLE_DEVICES=void", "CARREL_DEVICES=", "CARREL_GPU_COUNT=0")
	none := inspectOn(t, engine, ana.show("none"))
	if got := engine.Seen(); got != "" || len(none.HostConfig.DeviceRequests) > 0 || !slices.Contains(none.Config.Env, "NVIDIA_VISIBLE_DEVICES=void") {
		t.Errorf("none leases nothing; the hook saw %q, the container has %v and %+v", got, none.Config.Env, none.HostConfig.DeviceRequests)
	}

	// Two more 4090 than one would take the one that is in somebody's use; it is given out once that process is gone.
	ana.ok("up", "two", "--gpu", "4090:2", "-d", "-q")
	l.eventually("two waits with a reason", func() bool { return ana.show("two").Queue.Why != "" })
	if g := l.admin.gpus()[takenGPU]; ana.show("two").State != "queued" || g.Free || g.Workspace != "" {
		t.Errorf("with a process of somebody else's on %+v, two is %+v", g, ana.show("two"))
	}
	engine.Forget()
	scenario.Unset(t, "gpu2.compute", "gpu2.memory_used")
	devices := ana.waitState("two", "running").Devices
	ids := []string{devices[0].ID, devices[1].ID}
	if slices.Contains(ids, one) || !slices.Contains(ids, takenGPU) {
		t.Errorf("two got %v beside one's %s", ids, one)
	}
	requests := inspectOn(t, engine, ana.show("two")).HostConfig.DeviceRequests
	if len(requests) != 1 || requests[0].Count != 0 || !sameSet(requests[0].DeviceIDs, ids) || fmt.Sprint(requests[0].Capabilities) != "[[gpu]]" {
		t.Errorf("two leases %v; the engine was asked for %+v", ids, requests)
	}
	wantEnv(t, ana, "two", "NVIDIA_VISIBLE_DEVICES="+strings.Join(requests[0].DeviceIDs, ","), "CARREL_GPU_COUNT=2")
	if seen := strings.TrimSpace(strings.TrimPrefix(engine.Seen(), "NVIDIA_VISIBLE_DEVICES=")); !sameSet(strings.Split(seen, ","), ids) {
		t.Errorf("two leases %v; the hook saw %q", ids, seen)
	}
}

// checkInventory holds `gpus` against the scenario.
func checkInventory(t *testing.T, l *lab, xorg, train int) {
	t.Helper()
	var all map[string]gpu
	l.eventually("all devices are listed and sampled", func() bool {
		all = l.admin.gpus()
		return len(all) == 6 && len(all[desktopGPU].Processes) > 0 && len(all[takenGPU].Processes) > 0
	})
	const card, a100, notYet = "NVIDIA GeForce RTX 4090", "NVIDIA A100-SXM4-80GB", "a MIG instance: shown, but not given out yet"
	for id, want := range map[string]gpu{
		desktopGPU: {Index: 0, Product: card, Model: "4090", MemoryMiB: 24564, Capability: "8.9", Kind: "gpu", Health: "ok", Free: true},
		splitGPU:   {Index: 1, Product: a100, Model: "A100-80GB", MemoryMiB: 81920, Capability: "8.0", Kind: "mig_parent", Health: "ok", HealthReason: "in MIG mode: nothing runs on the whole of it"},
		smallSlice: {Index: 1, Product: a100 + " MIG 1g.10gb", Model: "A100-80GB/1g.10gb", MemoryMiB: 9728, Capability: "8.0", Kind: "mig", Parent: splitGPU, Health: "ok", HealthReason: notYet},
		largeSlice: {Index: 1, Product: a100 + " MIG 3g.40gb", Model: "A100-80GB/3g.40gb", MemoryMiB: 40192, Capability: "8.0", Kind: "mig", Parent: splitGPU, Health: "ok", HealthReason: notYet},
		takenGPU: {
			Index: 2, Product: card, Model: "4090", MemoryMiB: 24564, Capability: "8.9", Kind: "gpu", Health: "foreign",
			HealthReason: fmt.Sprintf("in use outside Carrel: pid %d (train) with 10240 MiB", train),
		},
		idleGPU: {Index: 3, Product: card, Model: "4090", MemoryMiB: 24564, Capability: "8.9", Kind: "gpu", Health: "ok", Free: true},
	} {
		got := all[id]
		got.Processes, got.ID = nil, ""
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s is\n%+v, want\n%+v", id, got, want)
		}
	}
	if p := all[desktopGPU].Processes; len(p) != 1 || p[0] != (gpuUser{PID: xorg, Name: "Xorg", MemoryMiB: 300, Graphics: true}) {
		t.Errorf("on the desktop's GPU are %+v", p)
	}
	if p := all[takenGPU].Processes; len(p) != 1 || p[0] != (gpuUser{PID: train, Name: "train", MemoryMiB: 10240}) {
		t.Errorf("on the GPU in somebody's use are %+v", p)
	}
	free := strings.Fields(l.admin.ok("gpus", "--free", "-q"))
	if !sameSet(free, []string{desktopGPU, idleGPU}) {
		t.Errorf("free are %v", free)
	}
}

// checkTop has a process of a workspace use its device, and looks for it in `top`.
func checkTop(t *testing.T, l *lab, engine *dockertest.Engine, scenario *testlib.Scenario, ana *person) {
	t.Helper()
	ana.sshOK("one.carrel", "setsid nohup sleep 7001 >/dev/null 2>&1 </dev/null &")
	w := ana.show("one")
	number := map[string]string{desktopGPU: "gpu0", idleGPU: "gpu3"}[w.Devices[0].ID]
	pid := pidInside(t, engine, w, "sleep 7001")
	scenario.Set(t, number+".compute", fmt.Sprintf("%d:2048", pid), number+".memory_used", "2400")
	var rows []struct {
		Device     string `json:"device_id"`
		PID        int    `json:"pid"`
		Process    string `json:"process"`
		ProcessMiB int64  `json:"process_memory_mib"`
		Workspace  string `json:"workspace"`
		User       string `json:"user"`
	}
	l.eventually("top shows the process of one", func() bool {
		out := l.admin.ok("top", "-o", "json")
		if err := json.Unmarshal([]byte(out), &rows); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		for _, r := range rows {
			if r.PID == pid {
				return r.Device == w.Devices[0].ID && r.Process == "sleep" && r.ProcessMiB == 2048 && r.Workspace == "one" && r.User == "ana"
			}
		}
		return false
	})
	if g := l.admin.gpus()[w.Devices[0].ID]; g.Health != "ok" {
		t.Errorf("with its holder's own process the device is %+v", g)
	}
	if text := ana.ok("top", "one"); !strings.Contains(text, "sleep") || !strings.Contains(text, strconv.Itoa(pid)) {
		t.Errorf("ana's top:\n%s", text)
	}
	scenario.Unset(t, number+".compute")
}

// TestNVMLGPUThatFails holds that a workspace whose GPU is lost goes on and is flagged, and that nobody gets the GPU before it has proved
// itself (GPU-03).
func TestNVMLGPUThatFails(t *testing.T) {
	t.Parallel()
	engine := gpuEngine(t)
	scenario := testlib.NewScenario(t, "gpu0.uuid", desktopGPU, "gpu1.uuid", idleGPU)
	l := newBareLab(t, "--samples-interval", "500ms")
	l.startNVMLAgent(scenario, testlib.Build(t), engine.Host, "--gpu-proof", "2s")
	ana := l.admin
	ana.ok("up", "one", "--gpu", "1", "-q")
	lost := ana.show("one").Devices[0].ID
	number := map[string]string{desktopGPU: "gpu0", idleGPU: "gpu1"}[lost]
	for _, fault := range []string{".err.uuid", ".err.all"} {
		scenario.Set(t, number+fault, "GPU_IS_LOST")
		l.eventually("the GPU is shown as lost", func() bool {
			g := ana.gpus()[lost]
			return g.Health == "lost" && strings.Contains(g.HealthReason, "GPU_IS_LOST") && g.Workspace == "one" && !g.Free
		})
	}
	if got := ana.sshOK("one.carrel", "echo in"); got != "in\n" || ana.show("one").State != "running" {
		t.Errorf("on a lost GPU one is %+v and says %q", ana.show("one"), got)
	}
	if text := ana.ok("show", "one"); !strings.Contains(text, "GPU_IS_LOST") {
		t.Errorf("show does not tell that the GPU is lost:\n%s", text)
	}
	ana.ok("stop", "one", "-q")
	ana.waitState("one", "stopped")

	ana.ok("up", "two", "--gpu", "1", "-q")
	if got := ana.show("two").Devices[0].ID; got == lost {
		t.Errorf("two got the lost %s", got)
	}
	ana.ok("up", "three", "--gpu", "1", "-d", "-q")
	l.eventually("three waits with a reason", func() bool { return ana.show("three").Queue.Why != "" })
	if g := ana.gpus()[lost]; g.Health != "lost" || g.Free || ana.show("three").State != "queued" {
		t.Errorf("after stop the device is %+v, and three is %+v", g, ana.show("three"))
	}
	scenario.Unset(t, number+".err.uuid", number+".err.all")
	l.eventually("the GPU has to prove itself", func() bool {
		g := ana.gpus()[lost]
		return g.Health == "failed" && strings.Contains(g.HealthReason, "answers well since") || g.Health == "ok"
	})
	if got := ana.waitState("three", "running").Devices[0].ID; got != lost {
		t.Errorf("three got %s, want %s, which is healthy again", got, lost)
	}
}

// TestNVMLWithoutGPURuntime holds that a host whose engine gives no GPUs says so and takes work without GPUs alone (GPU-11), and that a
// driver which comes and goes is seen without a restart (GPU-12).
func TestNVMLWithoutGPURuntime(t *testing.T) {
	t.Parallel()
	scenario := testlib.NewScenario(t, "gpu0.uuid", desktopGPU, "gpu1.uuid", idleGPU)
	library := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	l := newBareLab(t)
	l.startNVMLAgent(scenario, library, "unix:///var/run/docker.sock")
	ana := l.admin
	if all := ana.gpus(); len(all) != 0 {
		t.Errorf("without a driver there are %+v", all)
	}
	l.eventually("the host tells that there is no driver", func() bool { return strings.Contains(ana.problems(), "libnvidia-ml.so.1") })
	ana.ok("up", "none", "--gpu", "0", "--cpus", "0.1", "--memory", "128MiB")
	wantEnv(t, ana, "none", "NVIDIA_VISIBLE_DEVICES=void")

	text, err := os.ReadFile(testlib.Build(t))
	if err == nil {
		err = os.WriteFile(library+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(library+".new", library)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.eventually("the GPUs appear, and that nothing can use them", func() bool {
		all := ana.gpus()
		return len(all) == 2 && all[idleGPU].Health == "no_runtime" && all[desktopGPU].Health == "no_runtime"
	})
	if g := ana.gpus()[idleGPU]; g.Free || !strings.Contains(g.HealthReason, "nvidia-container-toolkit") {
		t.Errorf("%+v", g)
	}
	if got := ana.problems(); !strings.Contains(got, "GPU runtime missing") {
		t.Errorf("without a GPU runtime the host tells %q", got)
	}
	ana.fails([]string{"can be leased", "nvidia-container-toolkit"}, "up", "one", "--gpu", "1")
	ana.ok("up", "more", "--gpu", "0", "--cpus", "0.1", "--memory", "128MiB")

	scenario.Set(t, "init", "DRIVER_NOT_LOADED")
	l.eventually("the GPUs are gone with the driver", func() bool {
		g := ana.gpus()[idleGPU]
		return g.Health == "lost" && strings.Contains(g.HealthReason, "DRIVER_NOT_LOADED")
	})
	scenario.Unset(t, "init")
	l.eventually("the GPUs are back", func() bool { return ana.gpus()[idleGPU].Health == "no_runtime" })
	if w := ana.show("none"); w.State != "running" || w.Run.Epoch != 1 {
		t.Errorf("meanwhile none became %+v", w)
	}
}

// inspectOn returns the container of a workspace's run on a test's own engine.
func inspectOn(t *testing.T, e *dockertest.Engine, w shown) dockertypes.InspectResponse {
	t.Helper()
	c, err := e.API.ContainerInspect(t.Context(), containerName(w))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// pidInside finds a process of a workspace by its command line, and returns its pid on the host.
func pidInside(t *testing.T, e *dockertest.Engine, w shown, command string) int {
	t.Helper()
	top, err := e.API.ContainerTop(t.Context(), containerName(w), []string{"-eo", "pid,args"})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range top.Processes {
		if row[1] == command {
			pid, err := strconv.Atoi(row[0])
			if err != nil {
				t.Fatal(err)
			}
			return pid
		}
	}
	t.Fatalf("no %q in %v", command, top.Processes)
	return 0
}

// wantEnv checks variables of an ssh session.
func wantEnv(t *testing.T, p *person, name string, want ...string) {
	t.Helper()
	lines := strings.Split(p.sshOK(name+".carrel", "env"), "\n")
	for _, w := range want {
		if !slices.Contains(lines, w) {
			t.Errorf("%s has no %s:\n%s", name, w, strings.Join(lines, "\n"))
		}
	}
}

func sameSet(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	slices.Sort(a)
	slices.Sort(b)
	return slices.Equal(a, b)
}
