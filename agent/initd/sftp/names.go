package sftp

import (
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// names turns ids into names by the container's own passwd and group files, read once per channel, when first asked.
type names struct {
	users, groups map[uint32]string
}

func (n *names) user(id uint32) (string, bool) {
	if n.users == nil {
		n.users = readNames("/etc/passwd")
	}
	name, ok := n.users[id]
	return name, ok
}

func (n *names) group(id uint32) (string, bool) {
	if n.groups == nil {
		n.groups = readNames("/etc/group")
	}
	name, ok := n.groups[id]
	return name, ok
}

// readNames reads "name:x:id:..." lines; passwd and group agree in these three fields. The first line of an id counts.
func readNames(path string) map[uint32]string {
	out := make(map[uint32]string)
	data, err := os.ReadFile(path)
	if err != nil {
		return out // an image without the file: numbers are shown
	}
	for line := range strings.Lines(string(data)) {
		f := strings.SplitN(line, ":", 4)
		if len(f) < 4 {
			continue
		}
		id, err := strconv.ParseUint(f[2], 10, 32)
		if _, known := out[uint32(id)]; err != nil || known {
			continue
		}
		out[uint32(id)] = f[0]
	}
	return out
}

// longName is a line as "ls -l" prints it.
func (n *names) longName(name string, st *unix.Stat_t, now time.Time) string {
	user, ok := n.user(st.Uid)
	if !ok {
		user = strconv.FormatUint(uint64(st.Uid), 10)
	}
	group, ok := n.group(st.Gid)
	if !ok {
		group = strconv.FormatUint(uint64(st.Gid), 10)
	}
	when := time.Unix(st.Mtim.Sec, 0)
	layout := "Jan _2 15:04"
	if age := now.Sub(when); age > 180*24*time.Hour || age < -time.Hour {
		layout = "Jan _2  2006"
	}
	return fmt.Sprintf("%s %4d %-8s %-8s %8d %s %s", modeText(st.Mode), st.Nlink, user, group, st.Size, when.Format(layout), name)
}

func modeText(mode uint32) string {
	kinds := map[uint32]byte{
		unix.S_IFDIR: 'd', unix.S_IFLNK: 'l', unix.S_IFCHR: 'c', unix.S_IFBLK: 'b', unix.S_IFIFO: 'p', unix.S_IFSOCK: 's',
	}
	text := []byte(fs.FileMode(mode & 0o777).String())
	if kind, ok := kinds[mode&unix.S_IFMT]; ok {
		text[0] = kind
	}
	for _, bit := range [...]struct {
		flag, exec uint32
		at         int
		with, bare byte
	}{{unix.S_ISUID, 0o100, 3, 's', 'S'}, {unix.S_ISGID, 0o010, 6, 's', 'S'}, {unix.S_ISVTX, 0o001, 9, 't', 'T'}} {
		if mode&bit.flag == 0 {
			continue
		}
		text[bit.at] = bit.bare
		if mode&bit.exec != 0 {
			text[bit.at] = bit.with
		}
	}
	return string(text)
}
