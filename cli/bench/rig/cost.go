//go:build linux

package rig

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// clockTick is the unit of CPU times in /proc: USER_HZ, 100 on every Linux architecture that Go runs on (proc(5)).
const clockTick = time.Second / 100

// Cost is what a set of processes holds at one moment.
type Cost struct {
	RSSKiB, PSSKiB float64
	Descriptors    int
	Threads        int
	CPU            time.Duration // used since their start
	Processes      int
}

// Measure adds up the cost of processes; one that has ended fails.
func Measure(pids ...int) (Cost, error) {
	var sum Cost
	for _, pid := range pids {
		c, err := measureOne(pid)
		if err != nil {
			return Cost{}, fmt.Errorf("read the cost of process %d: %w", pid, err)
		}
		sum.RSSKiB += c.RSSKiB
		sum.PSSKiB += c.PSSKiB
		sum.Descriptors += c.Descriptors
		sum.Threads += c.Threads
		sum.CPU += c.CPU
		sum.Processes++
	}
	return sum, nil
}

func measureOne(pid int) (Cost, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	rollup, err := os.ReadFile(filepath.Join(dir, "smaps_rollup"))
	if err != nil {
		return Cost{}, err
	}
	var c Cost
	if c.RSSKiB, c.PSSKiB, err = parseRollup(rollup); err != nil {
		return Cost{}, err
	}
	fds, err := os.ReadDir(filepath.Join(dir, "fd"))
	if err != nil {
		return Cost{}, err
	}
	c.Descriptors = len(fds)
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return Cost{}, err
	}
	s, err := parseStat(string(stat))
	c.CPU, c.Threads = s.cpu, s.threads
	return c, err
}

func parseRollup(content []byte) (rss, pss float64, err error) {
	found := 0
	for scan := bufio.NewScanner(bytes.NewReader(content)); scan.Scan(); {
		fields := strings.Fields(scan.Text())
		if len(fields) < 2 || (fields[0] != "Rss:" && fields[0] != "Pss:") {
			continue
		}
		n, err := strconv.ParseFloat(fields[1], 64)
		if err != nil {
			return 0, 0, fmt.Errorf("smaps_rollup: %w", err)
		}
		found++
		if fields[0] == "Rss:" {
			rss = n
		} else {
			pss = n
		}
	}
	if found != 2 {
		return 0, 0, fmt.Errorf("smaps_rollup holds %d of Rss and Pss", found)
	}
	return rss, pss, nil
}

type procStat struct {
	parent, threads int
	cpu             time.Duration
}

// parseStat reads /proc/PID/stat; the command in parentheses may hold anything (proc(5)).
func parseStat(text string) (procStat, error) {
	end := strings.LastIndexByte(text, ')')
	if end < 0 {
		return procStat{}, fmt.Errorf("stat %.40q has no command", text)
	}
	f := strings.Fields(text[end+1:]) // f[0] is field 3, the state
	if len(f) < 18 {
		return procStat{}, fmt.Errorf("stat has %d fields behind the command", len(f))
	}
	var n [4]int
	for i, field := range []int{1, 11, 12, 17} { // ppid, utime, stime, num_threads
		v, err := strconv.Atoi(f[field])
		if err != nil {
			return procStat{}, fmt.Errorf("stat: %w", err)
		}
		n[i] = v
	}
	return procStat{parent: n[0], cpu: time.Duration(n[1]+n[2]) * clockTick, threads: n[3]}, nil
}

// Tree returns the process and all that descend from it.
func Tree(root int) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	children := map[int][]int{}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile(filepath.Join("/proc", e.Name(), "stat"))
		if err != nil {
			continue // ended meanwhile
		}
		if s, err := parseStat(string(stat)); err == nil {
			children[s.parent] = append(children[s.parent], pid)
		}
	}
	all := []int{root}
	for i := 0; i < len(all); i++ {
		all = append(all, children[all[i]]...)
	}
	return all, nil
}

// Meter counts the CPU time of this program and all that it starts from now on, also what outlives its parent: they
// share a control group of their own. Containers run in groups of the engine's and are added by name.
type Meter struct {
	dir, home string // our group; the one that we came from
}

// NewMeter makes the group and enters it. It needs root; both versions of control groups do.
func NewMeter() (*Meter, error) {
	home, err := groupOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	m := &Meter{home: home, dir: filepath.Join(home, "carrel-bench-"+strconv.Itoa(os.Getpid()))}
	if err := os.Mkdir(m.dir, 0o755); err != nil {
		return nil, fmt.Errorf("make a control group to count CPU time: %w", err)
	}
	if err := enter(m.dir, os.Getpid()); err != nil {
		_ = os.Remove(m.dir)
		return nil, err
	}
	return m, nil
}

// Close goes back to where it came from, with whatever is left in the group, and removes it.
func (m *Meter) Close() error {
	procs, err := os.ReadFile(filepath.Join(m.dir, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, pid := range strings.Fields(string(procs)) {
		n, err := strconv.Atoi(pid)
		if err != nil {
			return err
		}
		_ = enter(m.home, n) // may have ended meanwhile; if not, Remove fails
	}
	return os.Remove(m.dir)
}

// Used returns the CPU time so far of what was started here, and of the groups that the processes in also are in;
// without this program's own.
func (m *Meter) Used(also ...int) (time.Duration, error) {
	sum, err := groupCPU(m.dir)
	if err != nil {
		return 0, err
	}
	for _, pid := range also {
		dir, err := groupOf(pid)
		if err != nil {
			return 0, err
		}
		if dir == m.dir {
			continue
		}
		cpu, err := groupCPU(dir)
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	var self syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &self); err != nil {
		return 0, err
	}
	return sum - time.Duration(self.Utime.Nano()+self.Stime.Nano()), nil
}

func enter(dir string, pid int) error {
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0o644); err != nil {
		return fmt.Errorf("enter control group %s: %w", dir, err)
	}
	return nil
}

const groupRoot = "/sys/fs/cgroup"

// groupOf returns the directory of the control group that counts a process's CPU time.
func groupOf(pid int) (string, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return "", err
	}
	unified := ""
	for line := range strings.Lines(string(content)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(part) != 3 {
			continue
		}
		if part[0] == "0" {
			unified = part[2]
		}
		for controller := range strings.SplitSeq(part[1], ",") {
			if controller == "cpuacct" {
				return existing(filepath.Join(groupRoot, part[1], part[2]), filepath.Join(groupRoot, "cpuacct", part[2]))
			}
		}
	}
	return existing(filepath.Join(groupRoot, unified))
}

func existing(dirs ...string) (string, error) {
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, "cgroup.procs")); err == nil {
			return dir, nil
		}
	}
	return "", fmt.Errorf("no control group at %s", strings.Join(dirs, " or "))
}

func groupCPU(dir string) (time.Duration, error) {
	if content, err := os.ReadFile(filepath.Join(dir, "cpuacct.usage")); err == nil {
		n, err := strconv.ParseInt(strings.TrimSpace(string(content)), 10, 64)
		return time.Duration(n), err
	}
	content, err := os.ReadFile(filepath.Join(dir, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "usage_usec "); ok {
			n, err := strconv.ParseInt(strings.TrimSpace(value), 10, 64)
			return time.Duration(n) * time.Microsecond, err
		}
	}
	return 0, fmt.Errorf("%s/cpu.stat has no usage_usec", dir)
}

// Written returns how many bytes a process has written so far, sockets included (wchar in proc(5)).
func Written(pid int) (int64, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(content)) {
		if value, ok := strings.CutPrefix(line, "wchar: "); ok {
			return strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc/%d/io has no wchar", pid)
}
