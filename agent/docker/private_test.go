package docker_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/host"
)

// privateEngine is an engine of the test's own in a network namespace of its own, beside the system's.
type privateEngine struct {
	t      *testing.T
	dir    string
	netns  string
	host   string
	daemon *exec.Cmd
	done   chan error
}

// hook stands in for nvidia's: it writes down which devices each container that asks for any is to see.
const hook = `#!/bin/sh
bundle=$(sed -n 's/.*"bundle":"\([^"]*\)".*/\1/p')
sed 's/"/\n/g' "$bundle/config.json" | grep '^NVIDIA_VISIBLE_DEVICES=' >> SEEN
`

func newPrivateEngine(t *testing.T, config string) *privateEngine {
	t.Helper()
	dir, err := os.MkdirTemp("", "hosttest") // short: a unix socket's path has 107 bytes at most
	if err != nil {
		t.Fatal(err)
	}
	p := &privateEngine{t: t, dir: dir, netns: word(), host: "unix://" + dir + "/s"}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"bin/nvidia-container-runtime-hook": strings.ReplaceAll(hook, "SEEN", filepath.Join(dir, "seen")),
		"c.json":                            config,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(p.close)
	p.command("ip", "netns", "add", p.netns)
	p.command("ip", "-n", p.netns, "link", "set", "lo", "up")
	p.start()
	p.load(busybox)
	return p
}

func (p *privateEngine) command(args ...string) {
	p.t.Helper()
	if out, err := exec.CommandContext(context.Background(), args[0], args[1:]...).CombinedOutput(); err != nil {
		p.t.Fatalf("%v: %v\n%s", args, err, out)
	}
}

// start runs the daemon and waits until it answers.
func (p *privateEngine) start() {
	p.t.Helper()
	p.daemon = exec.CommandContext(context.Background(), "nsenter", "--net=/run/netns/"+p.netns, "dockerd", "--data-root", p.dir+"/data", "--exec-root", p.dir+"/exec",
		"-H", p.host, "--pidfile", p.dir+"/pid", "--config-file", p.dir+"/c.json")
	p.daemon.Env = append(os.Environ(), "PATH="+p.dir+"/bin:"+os.Getenv("PATH")+":/usr/sbin:/sbin")
	p.done = make(chan error, 1)
	var output strings.Builder
	p.daemon.Stdout, p.daemon.Stderr = &output, &output
	if err := p.daemon.Start(); err != nil {
		p.t.Fatal(err)
	}
	daemon, done := p.daemon, p.done
	go func() { done <- daemon.Wait() }()
	c, err := docker.New(docker.Options{Host: p.host})
	if err != nil {
		p.t.Fatal(err)
	}
	defer c.Close()
	deadline := time.Now().Add(time.Minute)
	for {
		if _, err = c.List(context.Background()); err == nil {
			return
		}
		select {
		case <-done:
			p.t.Fatalf("the engine ended: %s", output.String())
		case <-time.After(50 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("the engine does not answer: %v", err)
		}
	}
}

// end ends the daemon by a signal; nsenter has become it.
func (p *privateEngine) end(sig syscall.Signal) {
	p.t.Helper()
	if err := p.daemon.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		p.t.Error(err)
	}
	select {
	case <-p.done:
	case <-time.After(30 * time.Second):
		p.t.Error("the engine does not end")
	}
}

// endContainerd ends the containerd that the engine started, where it outlived the engine: containers have shims of their own.
func (p *privateEngine) endContainerd() {
	p.t.Helper()
	file := filepath.Join(p.dir, "exec/containerd/containerd.pid")
	content, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	if err != nil {
		p.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil {
		p.t.Fatal(err)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		p.t.Error(err)
	}
	if err := os.Remove(file); err != nil {
		p.t.Error(err)
	}
}

func (p *privateEngine) close() {
	c, err := docker.New(docker.Options{Host: p.host})
	if err == nil {
		list, err := c.List(context.Background())
		for _, l := range list {
			err = errors.Join(err, c.Remove(context.Background(), l.ID))
		}
		if err != nil {
			p.t.Error(err)
		}
		c.Close()
	}
	if p.daemon != nil {
		p.end(syscall.SIGTERM)
	}
	if err := unix.Unmount(p.dir+"/exec/netns/default", unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
		p.t.Log(err)
	}
	if out, err := exec.CommandContext(context.Background(), "ip", "netns", "del", p.netns).CombinedOutput(); err != nil {
		p.t.Logf("%s", out)
	}
	if err := os.RemoveAll(p.dir); err != nil {
		p.t.Log(err)
	}
}

// load copies an image from the system's engine.
func (p *privateEngine) load(ref string) {
	p.t.Helper()
	from := raw(p.t)
	to, err := client.NewClientWithOpts(client.WithHost(p.host), client.WithAPIVersionNegotiation())
	if err != nil {
		p.t.Fatal(err)
	}
	defer to.Close()
	saved, err := from.ImageSave(p.t.Context(), []string{ref})
	if err != nil {
		p.t.Fatal(err)
	}
	defer saved.Close()
	answer, err := to.ImageLoad(p.t.Context(), saved)
	if err != nil {
		p.t.Fatal(err)
	}
	defer answer.Body.Close()
	if _, err := io.Copy(io.Discard, answer.Body); err != nil {
		p.t.Fatal(err)
	}
	if _, err := to.ImageInspect(p.t.Context(), ref); err != nil {
		p.t.Fatal(err)
	}
}

func (p *privateEngine) seen() string {
	content, err := os.ReadFile(filepath.Join(p.dir, "seen"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		p.t.Fatal(err)
	}
	return string(content)
}

// GPU-06, T-18: what reaches nvidia's hook is exactly the lease; an image that wants all and leases none gets void.
func TestGPU06DevicesReachTheHook(t *testing.T) {
	p := newPrivateEngine(t, "{}")
	c := open(t, func(o *docker.Options) { o.Host = p.host })
	probe, err := c.Probe(t.Context(), host.ProbeRequest{InitFile: carrelInit(t), Device: "GPU-probe"})
	if err != nil || probe.GPU != "" {
		t.Fatalf("probe: %+v, %v", probe, err)
	}
	if got := p.seen(); !strings.Contains(got, "GPU-probe") {
		t.Errorf("the hook saw %q", got)
	}
	hostile := greedy(t, p.host)
	for i, s := range []struct {
		gpus []string
		want string
	}{
		{[]string{"GPU-aaaa", "GPU-bbbb"}, "NVIDIA_VISIBLE_DEVICES=GPU-aaaa,GPU-bbbb\n"},
		{nil, ""},
	} {
		if err := os.WriteFile(filepath.Join(p.dir, "seen"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		k := host.Key{Workspace: word(), Epoch: int64(i) + 1}
		sp := spec(t, k, hostile, script(t, "#!/bin/sh\necho visible=$NVIDIA_VISIBLE_DEVICES\n"+strings.TrimPrefix(standIn, "#!/bin/sh\n")))
		sp.GPUs = s.gpus
		visible := "void"
		if len(s.gpus) > 0 {
			visible = strings.Join(s.gpus, ",")
		}
		sp.Env = []string{"NVIDIA_VISIBLE_DEVICES=" + visible}
		id, err := c.Create(t.Context(), sp)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(t.Context(), id); err != nil {
			t.Fatal(err)
		}
		if got := p.seen(); !strings.HasSuffix(got, s.want) || s.want == "" && got != "" {
			t.Errorf("lease %v: the hook saw %q", s.gpus, got)
		}
		waitLine(t, c, id, "visible="+visible)
		if err := c.Remove(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
}

// greedy makes an image whose environment asks for every device.
func greedy(t *testing.T, engine string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "docker", "-H", engine, "build", "-q", "-")
	cmd.Env = append(os.Environ(), "DOCKER_BUILDKIT=0")
	cmd.Stdin = strings.NewReader(fmt.Sprintf("FROM %s\nENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=all\nLABEL dev.carrel.host=x dev.carrel.signature=y\n", busybox))
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("build: %v", err)
	}
	return strings.TrimSpace(string(out))
}

func waitLine(t *testing.T, c *docker.Client, id, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	found := errors.New("found")
	err := c.Logs(ctx, id, host.LogQuery{Follow: true}, func(_ time.Time, line string) error {
		if line == want {
			return found
		}
		return nil
	})
	if !errors.Is(err, found) {
		t.Errorf("no line %q: %v", want, err)
	}
}

// the engine dies under a running workspace, with live-restore and without. With it nothing ends; without, each end is
// told with the engine's time. A stopped engine is silence and nothing more.
func TestR5EngineDies(t *testing.T) {
	for _, restore := range []bool{true, false} {
		t.Run(fmt.Sprintf("live restore %v", restore), func(t *testing.T) {
			p := newPrivateEngine(t, fmt.Sprintf(`{"live-restore": %v}`, restore))
			c := open(t, func(o *docker.Options) { o.Host, o.Call, o.Slow = p.host, time.Second, 10*time.Second })
			img, err := c.Image(t.Context(), busybox)
			if err != nil {
				t.Fatal(err)
			}
			h := newHost(t, c)
			run := host.Desired{
				Key: host.Key{Workspace: word(), Epoch: 1}, Goal: host.GoalRunning, Name: "demo", Owner: "ana", ImageReference: busybox, ImageDigest: img.ID,
				Identity: host.Identity{Login: "ana", UID: 54321, GID: 54321}, CPUMillis: 500, MemoryMiB: 64, ShmMiB: 16, PidsLimit: 64, StopGrace: time.Second,
			}
			if _, err := h.Apply(t.Context(), host.Stamp{Database: 1}, host.Set{Runs: []host.Desired{run}}); err != nil {
				t.Fatal(err)
			}
			before := settle(t, h, run.Key, host.PhaseReady)
			if err := p.daemon.Process.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			silent(t, h, run.Key)
			if err := p.daemon.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			sig := syscall.SIGTERM
			if restore {
				sig = syscall.SIGKILL
			}
			p.end(sig)
			p.endContainerd()
			p.start()
			if !restore {
				o := settle(t, h, run.Key, host.PhaseGone)
				if o.EndedAge == nil || o.EndedUnattested {
					t.Errorf("%+v", o)
				}
				return
			}
			after := settle(t, h, run.Key, host.PhaseReady, host.PhaseGone)
			if after.Phase != host.PhaseReady || after.ContainerID != before.ContainerID {
				t.Errorf("before %+v, after %+v", before, after)
			}
		})
	}
}

// silent waits until a run is told with an engine that gives no answer; it must stay as it is.
func silent(t *testing.T, h *host.Host, k host.Key) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	found := errors.New("found")
	for ctx.Err() == nil {
		err := h.Observe(ctx, 0, time.Second, func(b host.Batch) error {
			for _, o := range b.Runs {
				if o.Key == k && (o.Phase != host.PhaseReady || o.EndedAge != nil) {
					t.Errorf("guessed: %+v", o)
				}
				if o.Key == k && o.EngineSilent != nil {
					return found
				}
			}
			return nil
		})
		if errors.Is(err, found) {
			return
		}
	}
	t.Error("the silence is not told")
}
