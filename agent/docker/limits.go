package docker

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"golang.org/x/sys/unix"
)

// limits is what the engine can give a container beyond its own limits, and what it cannot.
type limits struct {
	ulimits  []*units.Ulimit
	warnings []string
}

// engineLimits finds out once what ulimits the engine may set: one that it may not makes every start fail.
func (c *Client) engineLimits(ctx context.Context) limits {
	c.mu.Lock()
	known := c.limits
	c.mu.Unlock()
	if known != nil {
		return *known
	}
	pid, err := c.enginePID(ctx)
	if err != nil {
		return limits{} // asked again with the next container
	}
	found := limitsOf(fmt.Sprintf("/proc/%d", pid), c.opts.NoFile)
	c.mu.Lock()
	c.limits = &found
	c.mu.Unlock()
	return found
}

// enginePID asks the kernel who listens on the engine's socket: the engine, or systemd where that made the socket.
func (c *Client) enginePID(ctx context.Context) (int32, error) {
	path, ok := strings.CutPrefix(c.opts.Host, "unix://")
	if !ok {
		return 0, fmt.Errorf("%s is not a unix socket", c.opts.Host)
	}
	ctx, cancel := c.call(ctx)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { peer, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return peer.Pid, nil
}

// limitsOf reads a process's power over limits (capabilities(7), CAP_SYS_RESOURCE) and its own limits from /proc/<pid>.
func limitsOf(proc string, noFile int64) limits {
	status, errStatus := os.ReadFile(proc + "/status")
	own, errOwn := os.ReadFile(proc + "/limits")
	if errStatus != nil || errOwn != nil {
		return limits{warnings: []string{"the engine's own limits cannot be read; workspaces get its default limits"}}
	}
	may := hasCapability(status, unix.CAP_SYS_RESOURCE)
	hardFiles, files := hardLimit(own, "Max open files")
	_, memlock := hardLimit(own, "Max locked memory")
	var out limits
	if !may && files && hardFiles < noFile {
		out.warnings = append(out.warnings, fmt.Sprintf("the engine may open %d files at most, so workspaces get that and not %d", hardFiles, noFile))
		noFile = hardFiles
	}
	out.ulimits = append(out.ulimits, &units.Ulimit{Name: "nofile", Soft: noFile, Hard: noFile})
	if may || !memlock { // no limit stands there
		out.ulimits = append(out.ulimits, &units.Ulimit{Name: "memlock", Soft: -1, Hard: -1})
	} else {
		out.warnings = append(out.warnings, "the engine may not lift the limit of locked memory, which RDMA and pinned buffers need (it lacks CAP_SYS_RESOURCE)")
	}
	return out
}

func hasCapability(status []byte, bit int) bool {
	lines := bufio.NewScanner(bytes.NewReader(status))
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), "CapEff:"); ok {
			mask, err := strconv.ParseUint(strings.TrimSpace(rest), 16, 64)
			return err == nil && mask&(1<<bit) != 0
		}
	}
	return false
}

// hardLimit reads a line of /proc/<pid>/limits: name, soft, hard, unit. Without ok there is no limit.
func hardLimit(content []byte, name string) (limit int64, ok bool) {
	lines := bufio.NewScanner(bytes.NewReader(content))
	for lines.Scan() {
		if rest, found := strings.CutPrefix(lines.Text(), name); found {
			fields := strings.Fields(rest)
			if len(fields) < 2 {
				return 0, false
			}
			n, err := strconv.ParseInt(fields[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}
