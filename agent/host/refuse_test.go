package host_test

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

// T-47, GPU-09, D8: what a gateway asks beyond a host's policy is refused, each with a sentence, and nothing is made.
func TestT47Refusals(t *testing.T) {
	mount := func(m host.Mount) func(*host.Desired) {
		return func(d *host.Desired) { d.Mounts = append(d.Mounts, m) }
	}
	env := func(name, value string) func(*host.Desired) {
		return func(d *host.Desired) { d.Env = map[string]string{name: value} }
	}
	device := func(ids ...string) func(*host.Desired) {
		return func(d *host.Desired) {
			for _, id := range ids {
				d.Devices = append(d.Devices, host.Grant{ID: id, Simulated: strings.HasPrefix(id, "SIM")})
			}
		}
	}
	cases := map[string]struct {
		change func(*host.Desired)
		says   string
	}{
		"root":                       {func(d *host.Desired) { d.Identity.UID = 0 }, "uid 0"},
		"system uid":                 {func(d *host.Desired) { d.Identity.UID = 999 }, "below 1000"},
		"another login's uid":        {func(d *host.Desired) { d.Identity.UID = 12345 }, "is the login bea"},
		"root's group":               {func(d *host.Desired) { d.Identity.GID = 0 }, "gid 0"},
		"root among groups":          {func(d *host.Desired) { d.Identity.Groups = []host.Group{{Name: "root", GID: 0}} }, "gid 0"},
		"odd login":                  {func(d *host.Desired) { d.Identity.Login = "a:b\n" }, "POSIX login"},
		"overlong uid":               {func(d *host.Desired) { d.Identity.UID = 1 << 33 }, "uid"},
		"the whole host":             {mount(host.Mount{HostPath: "/", Target: "/m", ReadOnly: true}), "whole host"},
		"the engine's socket":        {mount(host.Mount{HostPath: "/var/run/docker.sock", Target: "/m"}), "/run"},
		"devices as a mount":         {mount(host.Mount{HostPath: "/dev", Target: "/m"}), "/dev"},
		"etc":                        {mount(host.Mount{HostPath: "/etc/ssh", Target: "/m"}), "/etc"},
		"dots":                       {mount(host.Mount{HostPath: "/srv/../etc", Target: "/m"}), "shortest form"},
		"not allowed here":           {mount(host.Mount{HostPath: "/srv/x", Target: "/m", ReadOnly: true, Public: true}), "does not allow /srv/x"},
		"relative":                   {mount(host.Mount{HostPath: "srv", Target: "/m"}), "absolute"},
		"both kinds":                 {mount(host.Mount{Volume: "v", HostPath: "/srv", Target: "/m"}), "neither"},
		"no kind":                    {mount(host.Mount{Target: "/m"}), "neither"},
		"volume id that is a path":   {mount(host.Mount{Volume: "../x", Target: "/m"}), "no volume id"},
		"volume id with a slash":     {mount(host.Mount{Volume: "a/b", Target: "/m"}), "no volume id"},
		"volume id as a flag":        {mount(host.Mount{Volume: "-v", Target: "/m"}), "no volume id"},
		"target over etc":            {mount(host.Mount{Volume: "v2", Target: "/etc"}), "/etc"},
		"target over carrel-init":    {mount(host.Mount{Volume: "v2", Target: "/.carrel/x"}), "/.carrel"},
		"target over the link":       {mount(host.Mount{Volume: "v2", Target: "/run/carrel-agent"}), "/run"},
		"target with dots":           {mount(host.Mount{Volume: "v2", Target: "/a/../etc"}), "shortest form"},
		"target root":                {mount(host.Mount{Volume: "v2", Target: "/"}), "image itself"},
		"target with NUL":            {mount(host.Mount{Volume: "v2", Target: "/a\x00b"}), "shortest form"},
		"target twice":               {mount(host.Mount{Volume: "v2", Target: "/home/ana"}), "twice"},
		"NVIDIA_VISIBLE_DEVICES":     {env("NVIDIA_VISIBLE_DEVICES", "all"), "NVIDIA_VISIBLE_DEVICES is set by Carrel"},
		"CUDA_VISIBLE_DEVICES":       {env("CUDA_VISIBLE_DEVICES", "0,1"), "CUDA_VISIBLE_DEVICES is set by Carrel"},
		"CARREL_":                    {env("CARREL_WORKSPACE", "x"), "set by Carrel"},
		"LD_PRELOAD":                 {env("LD_PRELOAD", "/x.so"), "set by Carrel"},
		"variable with =":            {env("A=B", "x"), "no name"},
		"variable with NUL":          {env("A", "x\x00"), "NUL"},
		"huge environment":           {env("A", strings.Repeat("x", 2<<20)), "bytes"},
		"device path":                {device("/dev/sda"), "no device id"},
		"all devices":                {device("all"), "no device id"},
		"two in one id":              {device("GPU-1,GPU-2"), "no device id"},
		"CDI name":                   {device("nvidia.com/gpu=all"), "no device id"},
		"a device twice":             {device(simOne, simOne), "twice"},
		"more devices than allowed":  {device(simOne, simTwo, "SIM-3"), "more than the 2"},
		"excluded device":            {device("SIM-excluded"), "taken out of use"},
		"no memory":                  {func(d *host.Desired) { d.MemoryMiB = 0 }, "memory"},
		"negative memory":            {func(d *host.Desired) { d.MemoryMiB = -1 }, "memory"},
		"no CPU limit":               {func(d *host.Desired) { d.CPUMillis = 0 }, "core"},
		"unlimited processes":        {func(d *host.Desired) { d.PidsLimit = -1 }, "processes"},
		"more shm than memory":       {func(d *host.Desired) { d.ShmMiB = 4096 }, "shared memory"},
		"a day's grace":              {func(d *host.Desired) { d.StopGrace = 24 * time.Hour }, "grace"},
		"odd host name":              {func(d *host.Desired) { d.Name = "a.b" }, "host name"},
		"image of another registry":  {func(d *host.Desired) { d.ImageReference = "evil.example.com/x:1" }, "does not allow the image"},
		"image without digest":       {func(d *host.Desired) { d.ImageDigest = "latest" }, "no image digest"},
		"image reference with space": {func(d *host.Desired) { d.ImageReference = "a b" }, "image reference"},
	}
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.opts.Policy = host.Policy{Images: []string{"registry.example.com/team/*"}, MaxGPUs: 2}
		r.start()
		set := host.Set{ExcludedDevices: []string{"SIM-excluded"}}
		names := slices.Sorted(maps.Keys(cases))
		for i, name := range names {
			d := run("w", int64(i)+1)
			cases[name].change(&d)
			set.Runs = append(set.Runs, d)
		}
		r.applySet(set)
		for i, name := range names {
			o := r.gone(host.Key{Workspace: "w", Epoch: int64(i) + 1})
			if o.Reason.Code != host.ReasonRefused || !strings.Contains(o.Reason.Message, cases[name].says) {
				t.Errorf("%s: %+v, want it to say %q", name, o.Reason, cases[name].says)
			}
		}
		if n := r.count("Create") + r.count("Pull"); n != 0 {
			t.Errorf("%d containers or pulls", n)
		}
	})
}

func TestSetsThatCannotBe(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		good := run("w1", 1)
		odd := func(change func(*host.Desired)) host.Set {
			d := run("w2", 1)
			change(&d)
			return host.Set{Runs: []host.Desired{good, d}}
		}
		for name, set := range map[string]host.Set{
			"no goal":      odd(func(d *host.Desired) { d.Goal = "" }),
			"epoch 0":      odd(func(d *host.Desired) { d.Key.Epoch = 0 }),
			"path as id":   odd(func(d *host.Desired) { d.Key.Workspace = "../x" }),
			"capital id":   odd(func(d *host.Desired) { d.Key.Workspace = "W" }),
			"named twice":  {Runs: []host.Desired{good, good}},
			"odd volume":   {VolumesGone: []string{"../../etc"}},
			"empty volume": {VolumesGone: []string{""}},
		} {
			if _, err := r.host.Apply(t.Context(), host.Stamp{Database: 9}, set); host.KindOf(err) != host.KindInvalid {
				t.Errorf("%s: %v", name, err)
			}
		}
		if s, applied := r.journal.Stamp(); applied {
			t.Errorf("a set that was refused left its stamp %v", s)
		}
		pass(time.Minute)
		r.wantNames()
	})
}

// GPU-13, T-18, GPU-09: every variable about devices speaks of the lease.
func TestGPU13Environment(t *testing.T) {
	for name, c := range map[string]struct {
		devices []host.Grant
		want    []string
	}{
		"none":      {nil, []string{"CARREL_DEVICES=", "CARREL_GPU_COUNT=0", "NVIDIA_VISIBLE_DEVICES=void"}},
		"simulated": {[]host.Grant{{ID: simOne, Simulated: true}}, []string{"CARREL_DEVICES=" + simOne, "CARREL_GPU_COUNT=1", "NVIDIA_VISIBLE_DEVICES=void"}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, r *rig) {
				d := run("w1", 1)
				d.Devices, d.Env = c.devices, map[string]string{"HF_HOME": "/home/ana/hf"}
				r.apply(d)
				r.ready(d.Key)
				spec, _ := r.engine.Spec("carrel-w1-1")
				for _, w := range append(c.want, "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CARREL_WORKSPACE=fraud", "CARREL_OWNER=ana", "CARREL_PROJECT=default", "CARREL_POOL=default", "HF_HOME=/home/ana/hf") {
					if !slices.Contains(spec.Env, w) {
						t.Errorf("no %s in %q", w, spec.Env)
					}
				}
				if len(spec.GPUs) != 0 {
					t.Errorf("the engine is asked for %v", spec.GPUs)
				}
				if got := r.inside.config[d.Key][0].Env["CARREL_GPU_COUNT"]; !slices.Contains(c.want, "CARREL_GPU_COUNT="+got) {
					t.Errorf("sessions see %q", got)
				}
			})
		})
	}
}

// T-21: a declared mount is where its admin said, whatever lies there now.
func TestT21DeclaredMounts(t *testing.T) {
	base := t.TempDir()
	for _, dir := range []string{"ok/sets", "open", "open/x", "rw", "home/ana"} {
		if err := os.MkdirAll(filepath.Join(base, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(base, "open"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", filepath.Join(base, "ok", "link")); err != nil {
		t.Fatal(err)
	}
	nosuid := filepath.Join(base, "mounted")
	if err := os.Mkdir(nosuid, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", nosuid, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(nosuid, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	policy := host.Policy{Mounts: []host.MountRoot{{Path: base}, {Path: base + "/rw", Writable: true}, {Path: nosuid, Writable: true}}}
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.opts.Policy = policy
		r.start()
		for i, c := range []struct {
			mount host.Mount
			sudo  bool
			says  string // empty: allowed
		}{
			{host.Mount{HostPath: base + "/ok/sets", ReadOnly: true}, false, ""},
			{host.Mount{HostPath: base + "/ok/sets", ReadOnly: true}, true, "declared public"},
			{host.Mount{HostPath: base + "/ok/sets", ReadOnly: true, Public: true}, true, ""},
			{host.Mount{HostPath: base + "/home/ana", ReadOnly: true, Home: true}, true, ""},
			{host.Mount{HostPath: base + "/ok/sets"}, false, "for reading only"},
			{host.Mount{HostPath: base + "/ok/link", ReadOnly: true}, false, "symbolic link"},
			{host.Mount{HostPath: base + "/ok/link/ssh", ReadOnly: true}, false, "symbolic link"},
			{host.Mount{HostPath: base + "/open/x", ReadOnly: true}, false, "others than root"},
			{host.Mount{HostPath: base + "/none", ReadOnly: true}, false, "no such file"},
			{host.Mount{HostPath: base + "/rw"}, false, "nosuid,nodev"},
			{host.Mount{HostPath: nosuid}, false, ""},
			{host.Mount{HostPath: r.opts.DataDir, ReadOnly: true}, false, "agent's own data"},
		} {
			d := run("w", int64(i)+1)
			c.mount.Target, c.mount.Name = "/m", "m"
			d.Sudo, d.Mounts = c.sudo, []host.Mount{c.mount}
			r.apply(d)
			o := r.within(time.Minute, d.Key, "settled", func(o host.Observed) bool { return o.Phase == host.PhaseReady || o.Phase == host.PhaseGone })
			if c.says == "" && o.Phase != host.PhaseReady || c.says != "" && !strings.Contains(o.Reason.Message, c.says) {
				t.Errorf("%+v, sudo %v: %+v, want %q", c.mount, c.sudo, o.Reason, c.says)
			}
			r.apply(gone(d))
			r.gone(d.Key)
		}
	})
}

func TestPolicyOfUIDs(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.opts.Policy = host.Policy{UIDs: []host.UIDRange{{First: 500, Last: 599}, {First: 12345, Last: 12345}}}
		r.start()
		for i, uid := range []int64{500, 12345} {
			d := run("w", int64(i)+1)
			d.Identity.UID, d.Mounts = uid, nil
			r.apply(d)
			r.ready(d.Key)
			r.apply(gone(d))
			r.gone(d.Key)
		}
	})
}

// Two runs that a gateway gives one device or one writable volume do not run at the same time.
func TestDeviceAndVolumeOneHolder(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		one, two, three := run("w1", 1), run("w2", 1), run("w1", 2)
		one.Devices = []host.Grant{{ID: simOne, Simulated: true}}
		two.Devices = one.Devices
		three.Key.Epoch = 2 // the same home
		r.apply(one)
		r.ready(one.Key)
		r.apply(one, two, three)
		pass(time.Minute)
		for _, d := range []host.Desired{two, three} {
			if o := r.of(d.Key); o.Phase == host.PhaseReady || o.Reason.Code != host.ReasonDeviceBusy {
				t.Errorf("%+v", o)
			}
		}
		r.wantNames("carrel-w1-1")
		r.restart()
		r.apply(one, two, three)
		pass(time.Minute)
		r.wantNames("carrel-w1-1")
		r.apply(gone(one), two, three)
		for _, d := range []host.Desired{two, three} {
			if o := r.ready(d.Key); o.Reason.Code != "" {
				t.Errorf("it still says %+v", o.Reason)
			}
		}
	})
}

func TestImagePolicy(t *testing.T) {
	bubble(t, func(t *testing.T, r *rig) {
		r.kill()
		r.opts.Policy = host.Policy{Images: []string{"carrel/base", "ghcr.io/lab/"}}
		r.start()
		r.engine.AddImage(host.Image{ID: hosttest.ID("x")}, "carrel/base:local", "docker.io/carrel/base:2", "ghcr.io/lab/x:1", "carrel/base2:1", "ghcr.io/labs/x:1")
		for ref, ok := range map[string]bool{
			"carrel/base:local": true, "docker.io/carrel/base:2": true, "ghcr.io/lab/x:1": true, "carrel/base2:1": false, "ghcr.io/labs/x:1": false, "ubuntu": false,
		} {
			_, err := r.host.ResolveImage(t.Context(), ref)
			if (host.KindOf(err) == host.KindInvalid) == ok {
				t.Errorf("%s: %v", ref, err)
			}
		}
	})
}
