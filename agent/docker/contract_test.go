package docker_test

import (
	"context"
	"crypto/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	dockertypes "github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"

	"github.com/carrel-dev/carrel/agent/docker"
	"github.com/carrel-dev/carrel/agent/host"
	"github.com/carrel-dev/carrel/agent/host/hosttest"
)

// busybox is the image that deploy/image/image.sh makes of Debian's static busybox.
const busybox = "carrel/busybox:local"

// standIn takes carrel-init's place: it writes two lines and waits for the polite signal.
const standIn = `#!/bin/sh
echo one
echo two
trap 'exit 0' TERM
while :; do sleep 1 & wait $!; done
`

func engineHost() string {
	if h := os.Getenv("DOCKER_HOST"); h != "" {
		return h
	}
	return docker.DefaultHost
}

// open makes a client with a network of the test's own.
func open(t *testing.T, change func(*docker.Options)) *docker.Client {
	t.Helper()
	opts := docker.Options{Host: engineHost(), Network: "hosttest-" + word()}
	if change != nil {
		change(&opts)
	}
	c, err := docker.New(opts)
	if err != nil {
		t.Fatal(err)
	}
	api := raw(t)
	t.Cleanup(func() {
		if err := api.NetworkRemove(context.Background(), opts.Network); err != nil && !cerrdefs.IsNotFound(err) {
			t.Logf("remove network: %v", err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func raw(t *testing.T) *client.Client {
	t.Helper()
	api, err := client.NewClientWithOpts(client.WithHost(engineHost()), client.WithAPIVersionNegotiation())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { api.Close() })
	return api
}

func word() string { return "hosttest" + strings.ToLower(rand.Text()[:10]) }

func script(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "carrel-init")
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func signer(t *testing.T) *host.Signer {
	t.Helper()
	s, err := host.NewSigner("hosttest", []byte("0123456789abcdef0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func spec(t *testing.T, k host.Key, image, program string) host.Spec {
	t.Helper()
	return host.Spec{
		Key: k, Image: image, Hostname: "demo", Env: []string{"CARREL_WORKSPACE=demo", "NVIDIA_VISIBLE_DEVICES=void"},
		Labels: signer(t).Labels(k, nil, nil), CPUMillis: 500, MemoryMiB: 64, ShmMiB: 16, Pids: 64, Stop: 3 * time.Second,
		InitFile: program, LinkDir: t.TempDir(),
	}
}

func TestContract(t *testing.T) {
	hosttest.Contract(t, func(t *testing.T) hosttest.Bench {
		api, workspace, program := raw(t), word(), script(t, standIn)
		return hosttest.Bench{
			Runtime: open(t, nil), Image: busybox, Lines: []string{"one", "two"},
			Key: func(epoch int64) host.Key { return host.Key{Workspace: workspace, Epoch: epoch} },
			Spec: func(t *testing.T, k host.Key, image string) host.Spec {
				t.Helper()
				return spec(t, k, image, program)
			},
			Kill: func(t *testing.T, name string) {
				t.Helper()
				if err := api.ContainerKill(t.Context(), name, "KILL"); err != nil {
					t.Fatal(err)
				}
			},
			Vanish: func(t *testing.T, name string) {
				t.Helper()
				if err := api.ContainerRemove(t.Context(), name, dockertypes.RemoveOptions{Force: true}); err != nil {
					t.Fatal(err)
				}
			},
		}
	})
}
