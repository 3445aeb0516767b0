package docker_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/network"

	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/host"
)

// carrelInit builds the real program.
func carrelInit(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "carrel-init")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", path, "../cmd/carrel-init")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build carrel-init: %v\n%s", err, out)
	}
	return path
}

// GPU-11: an engine without nvidia's hook and without CDI is found out before a workspace asks it.
func TestProbe(t *testing.T) {
	name := "hosttest-" + word()
	c := open(t, func(o *docker.Options) { o.Network = name })
	got, err := c.Probe(t.Context(), host.ProbeRequest{InitFile: carrelInit(t), Device: "GPU-00000000-0000-0000-0000-000000000000"})
	if err != nil {
		t.Fatal(err)
	}
	if got.Isolation != "" || got.Unavailable != "" {
		t.Errorf("isolation: %+v", got)
	}
	if !strings.Contains(got.GPU, "nvidia-container-toolkit") {
		t.Errorf("GPU: %q", got.GPU)
	}
	left, err := raw(t).NetworkInspect(t.Context(), name, network.InspectOptions{})
	if err != nil || len(left.Containers) > 0 {
		t.Errorf("left behind: %+v, %v", left.Containers, err)
	}
}

// A network of the same name on which containers reach each other is not used.
func TestNetworkThatDoesNotKeepApart(t *testing.T) {
	name := "hosttest-" + word()
	c := open(t, func(o *docker.Options) { o.Network = name })
	if _, err := raw(t).NetworkCreate(t.Context(), name, network.CreateOptions{Driver: "bridge"}); err != nil {
		t.Fatal(err)
	}
	_, err := c.Create(t.Context(), spec(t, host.Key{Workspace: word(), Epoch: 1}, hostImage(t, c), script(t, standIn)))
	if host.KindOf(err) != host.KindInternal || !strings.Contains(err.Error(), "keep containers apart") {
		t.Errorf("create: %v", err)
	}
}

func hostImage(t *testing.T, c *docker.Client) string {
	t.Helper()
	image, err := c.Image(t.Context(), busybox)
	if err != nil {
		t.Fatal(err)
	}
	return image.ID
}

// an engine that is away or silent is "no answer", never "not there".
func TestEngineThatIsAway(t *testing.T) {
	c, err := docker.New(docker.Options{Host: "unix://" + filepath.Join(t.TempDir(), "none.sock")})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = c.Inspect(t.Context(), "x")
	if host.KindOf(err) != host.KindUnavailable {
		t.Errorf("inspect: %v", err)
	}
	if _, err := c.List(t.Context()); host.KindOf(err) != host.KindUnavailable {
		t.Errorf("list: %v", err)
	}
	if err := c.Remove(t.Context(), "x"); host.KindOf(err) != host.KindUnavailable {
		t.Errorf("remove: %v", err)
	}
}
