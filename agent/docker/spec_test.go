package docker

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/go-units"

	"github.com/carrel-dev/carrel/agent/host"
)

var update = flag.Bool("update", false, "write the golden files anew")

func sample(sudo bool, gpus ...string) host.Spec {
	return host.Spec{
		Key: host.Key{Workspace: "w7k2", Epoch: 3}, Image: "sha256:" + strings.Repeat("a", 64), Hostname: "fraud",
		Env:    []string{"CARREL_WORKSPACE=fraud", "NVIDIA_VISIBLE_DEVICES=void"},
		Labels: map[string]string{"dev.carrel.workspace": "w7k2"},
		GPUs:   gpus, CPUMillis: 2500, MemoryMiB: 4096, ShmMiB: 2048, Pids: 4096, Sudo: sudo, Stop: 10 * time.Second,
		InitFile: "/var/lib/carrel/init/HASH/carrel-init", LinkDir: "/var/lib/carrel/links/w7k2-3",
		Mounts: []host.SpecMount{
			{Volume: "carrel-v1", Target: "/home/ana"},
			{HostPath: "/data/sets", Target: "/data", ReadOnly: true},
		},
	}
}

func set() setting {
	return setting{
		network: "carrel", logs: LogOptions{MaxSize: "10m", MaxFile: 3},
		ulimits: []*units.Ulimit{{Name: "nofile", Soft: 1 << 20, Hard: 1 << 20}},
	}
}

// T-19: the exact container is written down; a change of it is a change of what a hostile workspace may do.
func TestT19ExactContainer(t *testing.T) {
	for name, f := range map[string]create{
		"sudo.json":   form(sample(true), set()),
		"nosudo.json": form(sample(false, "GPU-1", "GPU-2"), set()),
	} {
		got, err := json.MarshalIndent(f, "", "  ")
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join("testdata", name)
		if *update {
			if err := os.WriteFile(path, append(got, '\n'), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if string(got)+"\n" != string(want) {
			t.Errorf("%s differs; look at each change, then run with -update\n%s", name, got)
		}
	}
}

// T-37, T-36, REL-04, CONT-07: what bounds a workspace.
func TestLimitsOfAWorkspace(t *testing.T) {
	h := form(sample(true), set()).Host
	if h.Memory != 4<<30 || h.MemorySwap != h.Memory || *h.PidsLimit != 4096 || h.NanoCPUs != 25e8 || h.ShmSize != 2<<30 {
		t.Errorf("limits: %+v, shm %d", h.Resources, h.ShmSize)
	}
	if h.LogConfig.Type != "local" || h.LogConfig.Config["max-size"] != "10m" {
		t.Errorf("log: %+v", h.LogConfig)
	}
	if h.RestartPolicy.Name != container.RestartPolicyDisabled {
		t.Errorf("restart policy %q: the engine would start it by itself", h.RestartPolicy.Name)
	}
}

// T-47, GPU-09: whatever a spec holds, nothing of the host comes with it.
func TestT47NothingOfTheHost(t *testing.T) {
	for _, s := range []host.Spec{sample(true), sample(false, "GPU-1")} {
		f := form(s, set())
		h := f.Host
		if h.Privileged || h.PidMode != "" || h.UTSMode != "" || h.UsernsMode != "" || h.IpcMode != "private" || h.CgroupnsMode != "" ||
			len(h.Devices) > 0 || len(h.DeviceCgroupRules) > 0 || len(h.PortBindings) > 0 || h.PublishAllPorts || h.Runtime != "" ||
			len(h.VolumesFrom) > 0 || len(h.Binds) > 0 || h.CgroupParent != "" || len(h.Sysctls) > 0 || h.NetworkMode != "carrel" ||
			h.MaskedPaths != nil || h.ReadonlyPaths != nil {
			t.Errorf("host: %+v", h)
		}
		for _, never := range []string{"MKNOD", "SYS_PTRACE", "NET_RAW", "SETFCAP", "SYS_ADMIN", "NET_ADMIN"} {
			if slices.Contains(h.CapAdd, never) {
				t.Errorf("capability %s", never)
			}
		}
		if !reflect.DeepEqual([]string(h.CapDrop), []string{"ALL"}) {
			t.Errorf("dropped: %v", h.CapDrop)
		}
		for _, o := range h.SecurityOpt {
			if strings.Contains(o, "unconfined") {
				t.Errorf("security option %q", o)
			}
		}
		for _, m := range h.Mounts {
			if m.Source == s.InitFile && !m.ReadOnly || m.Source == s.LinkDir && !m.ReadOnly {
				t.Errorf("%s is writable", m.Source)
			}
		}
	}
}

// GPU-06: one request, by ids and not by count; none without devices.
func TestGPU06DeviceRequests(t *testing.T) {
	got := form(sample(true, "GPU-a", "GPU-b"), set()).Host.DeviceRequests
	want := []container.DeviceRequest{{DeviceIDs: []string{"GPU-a", "GPU-b"}, Capabilities: [][]string{{"gpu"}}}}
	if !reflect.DeepEqual(got, want) || got[0].Count != 0 {
		t.Errorf("requests %+v", got)
	}
	if got := form(sample(true), set()).Host.DeviceRequests; len(got) != 0 {
		t.Errorf("requests without devices: %+v", got)
	}
	cdi := set()
	cdi.gpu = gpuByCDI
	want = []container.DeviceRequest{{Driver: "cdi", DeviceIDs: []string{"nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-b"}}}
	if got := form(sample(true, "GPU-a", "GPU-b"), cdi).Host.DeviceRequests; !reflect.DeepEqual(got, want) {
		t.Errorf("by CDI: %+v", got)
	}
}

// No code here copies into or out of a container: those calls resolve paths that a container writes.
func TestNeverCopiesIntoContainers(t *testing.T) {
	files, err := filepath.Glob("../*/*.go")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, call := range []string{"CopyTo" + "Container", "CopyFrom" + "Container", "ContainerStat" + "Path"} {
			if strings.Contains(string(text), call) {
				t.Errorf("%s uses %s", f, call)
			}
		}
	}
}

func TestProgressOfAPull(t *testing.T) {
	stream := `{"status":"Pulling from x","id":"latest"}
{"status":"Pulling fs layer","progressDetail":{},"id":"a"}
{"status":"Downloading","progressDetail":{"current":10,"total":100},"id":"a"}
{"status":"Downloading","progressDetail":{"current":50,"total":50},"id":"b"}
{"status":"Download complete","progressDetail":{},"id":"a"}
{"status":"Extracting","progressDetail":{"current":3,"total":100},"id":"a"}
{"status":"Pull complete","progressDetail":{},"id":"b"}
`
	var last host.PullProgress
	moments := map[string]bool{}
	if err := readPull(strings.NewReader(stream), func(p host.PullProgress) { last = p; moments[p.Moment] = true }); err != nil {
		t.Fatal(err)
	}
	if last.Done != 150 || last.Total != 150 || len(moments) != 7 {
		t.Errorf("%+v, %d moments", last, len(moments))
	}
}

// CONT-03: failures stand inside the stream, or cut it.
func TestCONT03FailuresInTheStream(t *testing.T) {
	for text, want := range map[string]host.Kind{
		`{"status":"x"}` + "\n" + `{"errorDetail":{"message":"unauthorized: authentication required"},"error":"unauthorized"}`: host.KindDenied,
		`{"error":"write /var/lib/docker/tmp/x: no space left on device"}`:                                                     host.KindNoSpace,
		`{"errorDetail":{"message":"manifest unknown"}}`:                                                                       host.KindNotFound,
		`{"errorDetail":{"message":"something odd"}}`:                                                                          host.KindInternal,
		`{"status":"Downl`: host.KindUnavailable,
	} {
		err := pullFailed("r/x@sha256:1", readPull(strings.NewReader(text), func(host.PullProgress) {}))
		if host.KindOf(err) != want {
			t.Errorf("%s: %v is of kind %s, want %s", text, err, host.KindOf(err), want)
		}
	}
}

func TestLimitsOfTheEngine(t *testing.T) {
	write := func(capEff, files, memlock string) string {
		dir := t.TempDir()
		for name, text := range map[string]string{
			"status": "Name:\tdockerd\nCapEff:\t" + capEff + "\n",
			"limits": "Limit Soft Hard Units\nMax open files            1024                 " + files + "                files     \n" +
				"Max locked memory         65536                " + memlock + "                bytes     \n",
		} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	full := limitsOf(write("000001ffffffffff", "1024", "65536"), 1<<20)
	if len(full.ulimits) != 2 || full.ulimits[0].Hard != 1<<20 || full.ulimits[1].Hard != -1 || len(full.warnings) != 0 {
		t.Errorf("with CAP_SYS_RESOURCE: %+v", full)
	}
	weak := limitsOf(write("00000000a80425fb", "20000", "65536"), 1<<20)
	if len(weak.ulimits) != 1 || weak.ulimits[0].Hard != 20000 || len(weak.warnings) != 2 {
		t.Errorf("without: %+v", weak)
	}
	if none := limitsOf(t.TempDir(), 1<<20); len(none.ulimits) != 0 || len(none.warnings) != 1 {
		t.Errorf("unreadable: %+v", none)
	}
}
