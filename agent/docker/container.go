package docker

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	cerrdefs "github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/carrel-dev/carrel/agent/host"
)

// Create makes a container; see [host.Containers].
func (c *Client) Create(ctx context.Context, spec host.Spec) (string, error) {
	if err := c.ensureNetwork(ctx); err != nil {
		return "", err
	}
	f := form(spec, c.setting(ctx))
	ctx, cancel := c.slow(ctx)
	defer cancel()
	made, err := c.api.ContainerCreate(ctx, f.Config, f.Host, nil, nil, f.Name)
	if err != nil {
		return "", failed("make container "+f.Name, err)
	}
	return made.ID, nil
}

func (c *Client) setting(ctx context.Context) setting {
	c.mu.Lock()
	mode := c.gpu
	c.mu.Unlock()
	return setting{network: c.opts.Network, logs: c.opts.Logs, gpu: mode, ulimits: c.engineLimits(ctx).ulimits}
}

// Start starts a container.
func (c *Client) Start(ctx context.Context, id string) error {
	ctx, cancel := c.slow(ctx)
	defer cancel()
	return failed("start container "+short(id), c.api.ContainerStart(ctx, id, container.StartOptions{}))
}

// Stop ends a container.
func (c *Client) Stop(ctx context.Context, id string, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+c.opts.Call)
	defer cancel()
	return failed("stop container "+short(id), c.api.ContainerStop(ctx, id, container.StopOptions{Timeout: seconds(grace)}))
}

// Remove removes a container and the nameless volumes that its image asked for.
func (c *Client) Remove(ctx context.Context, id string) error {
	ctx, cancel := c.slow(ctx)
	defer cancel()
	err := c.api.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
	if cerrdefs.IsNotFound(err) {
		return nil
	}
	return failed("remove container "+short(id), err)
}

// Inspect looks at a container.
func (c *Client) Inspect(ctx context.Context, idOrName string) (host.Container, error) {
	ctx, cancel := c.call(ctx)
	defer cancel()
	got, err := c.api.ContainerInspect(ctx, idOrName)
	if err != nil {
		return host.Container{}, failed("look at container "+short(idOrName), err)
	}
	if got.ContainerJSONBase == nil || got.State == nil || got.Config == nil {
		return host.Container{}, host.Errorf(host.KindUnavailable, "look at container %s: the engine's answer is incomplete", short(idOrName))
	}
	return host.Container{
		ID: got.ID, Name: strings.TrimPrefix(got.Name, "/"), State: host.State(got.State.Status), Labels: got.Config.Labels,
		PID: got.State.Pid, StartedAt: engineTime(got.State.StartedAt), FinishedAt: engineTime(got.State.FinishedAt),
		ExitCode: got.State.ExitCode, OutOfMemory: got.State.OOMKilled, StartError: got.State.Error,
	}, nil
}

// List lists all containers.
func (c *Client) List(ctx context.Context) ([]host.Container, error) {
	ctx, cancel := c.call(ctx)
	defer cancel()
	list, err := c.api.ContainerList(ctx, container.ListOptions{All: true})
	if err != nil {
		return nil, failed("list containers", err)
	}
	out := make([]host.Container, 0, len(list))
	for _, l := range list {
		out = append(out, host.Container{ID: l.ID, Name: ownName(l.Names), State: host.State(l.State), Labels: l.Labels})
	}
	return out, nil
}

// ownName leaves out the names that links gave, which have a second slash.
func ownName(names []string) string {
	for _, n := range names {
		if n = strings.TrimPrefix(n, "/"); !strings.Contains(n, "/") {
			return n
		}
	}
	return ""
}

// Events listens for what happens to containers.
func (c *Client) Events(ctx context.Context, since time.Time, live func(), each func(host.Event)) error {
	// The client reads the API version for its events without a lock: any other call settles it first.
	if err := c.settleVersion(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	messages, errs := c.api.Events(ctx, events.ListOptions{
		Since:   fmt.Sprintf("%d.%09d", since.Unix(), since.Nanosecond()),
		Filters: filters.NewArgs(filters.Arg("type", string(events.ContainerEventType))),
	})
	select {
	case err := <-errs:
		return failed("listen to the engine's events", err)
	default:
	}
	live()
	for {
		select {
		case err := <-errs:
			if err == nil || errors.Is(err, io.EOF) {
				err = host.Errorf(host.KindUnavailable, "the engine closed the stream")
			}
			return failed("listen to the engine's events", err)
		case m := <-messages:
			if e, ok := eventOf(m); ok {
				each(e)
			}
		}
	}
}

func (c *Client) settleVersion(ctx context.Context) error {
	ctx, cancel := c.call(ctx)
	defer cancel()
	_, err := c.api.ServerVersion(ctx)
	return failed("ask the engine for its version", err)
}

func eventOf(m events.Message) (host.Event, bool) {
	e := host.Event{Kind: host.EventOther, ID: m.Actor.ID, At: time.Unix(0, m.TimeNano)}
	switch m.Action {
	case events.ActionDie:
		e.Kind = host.EventDie
		code, err := strconv.Atoi(m.Actor.Attributes["exitCode"])
		if err != nil {
			code = -1
		}
		e.ExitCode = code
	case events.ActionOOM:
		e.Kind = host.EventOOM
	case events.ActionDestroy:
		e.Kind = host.EventDestroy
	case events.ActionStart, events.ActionPause, events.ActionUnPause, events.ActionRename:
	default:
		return e, false // exec and the like
	}
	return e, true
}

// maxLine bounds one line of a log.
const maxLine = 64 << 10

// Logs reads what the first process wrote, errors among the rest.
func (c *Client) Logs(ctx context.Context, id string, q host.LogQuery, each func(time.Time, string) error) error {
	if !q.Follow {
		var cancel context.CancelFunc
		ctx, cancel = c.slow(ctx)
		defer cancel()
	}
	o := container.LogsOptions{ShowStdout: true, ShowStderr: true, Timestamps: true, Follow: q.Follow}
	if q.Tail > 0 {
		o.Tail = strconv.Itoa(q.Tail)
	}
	body, err := c.api.ContainerLogs(ctx, id, o)
	if err != nil {
		return failed("read the log of container "+short(id), err)
	}
	defer body.Close()
	pipe, write := io.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, err := stdcopy.StdCopy(write, write, body)
		write.CloseWithError(err)
	}()
	err = eachLine(pipe, each)
	pipe.CloseWithError(err)
	if err != nil {
		body.Close()
	}
	<-done
	return err
}

// eachLine splits a log with times. A line that is too long is cut.
func eachLine(r io.Reader, each func(time.Time, string) error) error {
	b := bufio.NewReaderSize(r, maxLine)
	for {
		raw, err := b.ReadSlice('\n')
		line := string(raw)
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = b.ReadSlice('\n')
		}
		if line != "" {
			stamp, text, _ := strings.Cut(strings.TrimRight(line, "\r\n"), " ")
			if stop := each(engineTime(stamp), text); stop != nil {
				return stop
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return failed("read a container's log", err)
		}
	}
}

// Usage reads what a running container uses.
func (c *Client) Usage(ctx context.Context, id string) (host.Usage, error) {
	ctx, cancel := c.call(ctx)
	defer cancel()
	got, err := c.api.ContainerStatsOneShot(ctx, id)
	if err != nil {
		return host.Usage{}, failed("measure container "+short(id), err)
	}
	defer got.Body.Close()
	var s container.StatsResponse
	if err := json.NewDecoder(got.Body).Decode(&s); err != nil {
		return host.Usage{}, failed("measure container "+short(id), err)
	}
	used := s.MemoryStats.Usage
	// The page cache that the kernel would give back first: cgroup v2's name, then v1's.
	for _, name := range []string{"inactive_file", "total_inactive_file"} {
		if cache, ok := s.MemoryStats.Stats[name]; ok && cache < used {
			if name == "inactive_file" {
				if _, v1 := s.MemoryStats.Stats["total_inactive_file"]; v1 {
					continue // v1 has both; the total counts the children too
				}
			}
			used -= cache
			break
		}
	}
	return host.Usage{
		CPU:         time.Duration(s.CPUStats.CPUUsage.TotalUsage),
		MemoryBytes: int64(used),
	}, nil
}

// engineTime reads a time as the engine writes it; its "never" is the zero time.
func engineTime(s string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.Year() <= 1 {
		return time.Time{}
	}
	return t
}

// short is an id as people see it.
func short(id string) string {
	const digits = 12
	if len(id) == 64 {
		return id[:digits]
	}
	return id
}
