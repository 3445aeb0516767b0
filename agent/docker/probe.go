package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/host"
)

// probeLabel marks the containers of a probe, which last seconds; agent/host leaves them out of what it shows.
const probeLabel = "dev.carrel.probe"

const (
	probeImage   = "carrel-probe"
	probeTimeout = 45 * time.Second
	probeDial    = 700 * time.Millisecond // a connection within one host takes well under a millisecond
)

// Probe tries whether containers are kept apart and, with a device, whether the engine gives GPUs to containers.
func (c *Client) Probe(ctx context.Context, p host.ProbeRequest) (result host.ProbeResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if err := c.ensureNetwork(ctx); err != nil {
		return result, err
	}
	id, err := c.importProbe(ctx, p.InitFile)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, c.sweepProbes(context.WithoutCancel(ctx))) }()
	if err := c.sweepProbes(ctx); err != nil {
		return result, err
	}
	one, err := c.runProbe(ctx, id, nil)
	if err != nil {
		return result, fmt.Errorf("try the engine: %w", err)
	}
	two, err := c.runProbe(ctx, id, nil)
	if err != nil {
		return result, fmt.Errorf("try the engine: %w", err)
	}
	result.Isolation, result.Unavailable = c.apart(ctx, one, two)
	if p.Device != "" {
		result.GPU, err = c.probeGPU(ctx, id, p.Device)
	}
	return result, err
}

// probeGPU starts containers that ask for a device. That one without starts well was seen before.
func (c *Client) probeGPU(ctx context.Context, imageID, device string) (why string, err error) {
	var reasons []string
	for _, mode := range []gpuMode{gpuByRequest, gpuByCDI} {
		_, err := c.runProbe(ctx, imageID, deviceRequests([]string{device}, mode))
		switch {
		case err == nil:
			c.mu.Lock()
			c.gpu = mode
			c.mu.Unlock()
			return "", nil
		case host.KindOf(err) == host.KindUnavailable || errors.Is(err, context.Canceled):
			return "", err
		}
		reasons = append(reasons, lastPart(err))
	}
	return "the engine gives no GPU to containers; install nvidia-container-toolkit on this host and restart the engine (" +
		strings.Join(reasons, "; ") + ")", nil
}

func lastPart(err error) string {
	var e *host.Error
	if errors.As(err, &e) && e.Cause != nil {
		return e.Cause.Error()
	}
	return err.Error()
}

// importProbe makes an image that holds carrel-init and nothing else, so that no registry is needed.
func (c *Client) importProbe(ctx context.Context, initFile string) (string, error) {
	program, err := os.ReadFile(initFile)
	if err != nil {
		return "", fmt.Errorf("read carrel-init: %w", err)
	}
	name := fmt.Sprintf("%s:%x", probeImage, sha256.Sum256(program))
	if there, err := c.Image(ctx, name); host.KindOf(err) != host.KindNotFound {
		return there.ID, err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err = w.WriteHeader(&tar.Header{Name: "carrel-init", Mode: 0o755, Size: int64(len(program)), Typeflag: tar.TypeReg})
	if err == nil {
		_, err = w.Write(program)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return "", fmt.Errorf("pack carrel-init: %w", err)
	}
	body, err := c.api.ImageImport(ctx, image.ImportSource{Source: &archive, SourceName: "-"}, name, image.ImportOptions{
		Changes: []string{`ENTRYPOINT ["/carrel-init"]`, `CMD ["init"]`, "LABEL " + probeLabel + "=image"},
	})
	if err != nil {
		return "", failed("make the probe's image", err)
	}
	defer body.Close()
	if _, err := io.Copy(io.Discard, body); err != nil {
		return "", failed("make the probe's image", err)
	}
	c.sweepProbeImages(ctx, name)
	got, err := c.Image(ctx, name)
	return got.ID, err
}

// probeImageLife is how long an earlier version's image stays: another agent may just be using it.
const probeImageLife = 24 * time.Hour

// sweepProbeImages removes the images of earlier versions; one that is in use stays for the next time.
func (c *Client) sweepProbeImages(ctx context.Context, keep string) {
	list, err := c.api.ImageList(ctx, image.ListOptions{Filters: filters.NewArgs(filters.Arg("label", probeLabel+"=image"))})
	if err != nil {
		return // the next version tries again
	}
	for _, i := range list {
		if !slices.Contains(i.RepoTags, keep) && time.Since(time.Unix(i.Created, 0)) > probeImageLife {
			_, _ = c.api.ImageRemove(ctx, i.ID, image.RemoveOptions{})
		}
	}
}

func (c *Client) runProbe(ctx context.Context, imageID string, devices []container.DeviceRequest) (id string, err error) {
	pids := int64(64)
	made, err := c.api.ContainerCreate(ctx,
		&container.Config{Image: imageID, Labels: map[string]string{probeLabel: "container"}, Env: []string{"NVIDIA_VISIBLE_DEVICES=void"}},
		&container.HostConfig{
			NetworkMode: container.NetworkMode(c.opts.Network), CapDrop: []string{"ALL"}, SecurityOpt: []string{"no-new-privileges:true"},
			Resources: container.Resources{Memory: 128 << 20, PidsLimit: &pids, DeviceRequests: devices},
		}, nil, nil, "carrel-probe-x"+strings.ToLower(rand.Text()))
	if err != nil {
		return "", failed("make a container to try", err)
	}
	return made.ID, failed("start a container to try", c.api.ContainerStart(ctx, made.ID, container.StartOptions{}))
}

// sweepProbes removes the containers of this and of earlier probes.
func (c *Client) sweepProbes(ctx context.Context) error {
	ctx, cancel := c.slow(ctx)
	defer cancel()
	list, err := c.api.ContainerList(ctx, container.ListOptions{
		All: true, Filters: filters.NewArgs(filters.Arg("label", probeLabel+"=container"), filters.Arg("network", c.opts.Network)),
	})
	if err != nil {
		return failed("list the probe's containers", err)
	}
	var errs []error
	for _, l := range list {
		// A conflict: another agent on this engine is just removing it.
		if err := c.Remove(ctx, l.ID); host.KindOf(err) != host.KindConflict {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// apart dials from one container's network to the other's; the answer from its own network shows that something listens.
func (c *Client) apart(ctx context.Context, one, two string) (problem, unavailable string) {
	a, errA := c.api.ContainerInspect(ctx, one)
	b, errB := c.api.ContainerInspect(ctx, two)
	if errA != nil || errB != nil || !a.State.Running || !b.State.Running {
		return "", "the probe's containers do not run"
	}
	endpoint := a.NetworkSettings.Networks[c.opts.Network]
	if endpoint == nil || endpoint.IPAddress == "" {
		return "", "the probe's container has no address"
	}
	var listener net.Listener
	err := inNetwork(a.State.Pid, func() (err error) {
		listener, err = net.Listen("tcp4", net.JoinHostPort(endpoint.IPAddress, "0"))
		return err
	})
	if err != nil {
		return "", "the container's network cannot be entered: " + err.Error()
	}
	defer listener.Close()
	dial := func() error {
		conn, err := net.DialTimeout("tcp4", listener.Addr().String(), probeDial)
		if err == nil {
			err = conn.Close()
		}
		return err
	}
	if err := inNetwork(a.State.Pid, dial); err != nil {
		return "", "the container does not reach itself: " + err.Error()
	}
	if err := inNetwork(b.State.Pid, dial); err == nil {
		return "one container on the network " + c.opts.Network + " reached another; look at the engine's iptables setting", ""
	}
	return "", ""
}

// inNetwork runs fn on a thread in the network of a process. The thread ends with it, so that no other code runs there.
func inNetwork(pid int, fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread is thrown away
		done <- func() error {
			ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
			if err != nil {
				return err
			}
			defer ns.Close()
			if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("setns: %w", err)
			}
			return fn()
		}()
	}()
	return <-done
}
