// Package account makes the workspace's user known inside a container: passwd and group lines, home and sudo rule.
package account

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Group is a POSIX group.
type Group struct {
	Name string
	GID  int
}

// User is who the workspace's user is inside.
type User struct {
	Login  string
	UID    int
	GID    int
	Groups []Group // beside GID
	Home   string
}

// passwdLines gives old with exactly one line for u. The image's lines with the same login or uid give way; a shell and a
// comment that the login already had are kept, since chsh and chfn write them there.
func passwdLines(old, shell string, u User) string {
	uid, comment := strconv.Itoa(u.UID), ""
	lines := slices.DeleteFunc(split(old), func(line string) bool {
		f := strings.Split(line, ":")
		if len(f) < 7 {
			return false
		}
		if f[0] == u.Login && f[2] == uid {
			comment = f[4]
			if f[6] != "" {
				shell = f[6]
			}
		}
		return f[0] == u.Login || f[2] == uid
	})
	line := fmt.Sprintf("%s:x:%d:%d:%s:%s:%s", u.Login, u.UID, u.GID, comment, u.Home, shell)
	return join(append(lines, line))
}

// groupLines gives old with a line for the user's primary group and for each further one, which lists the login. A gid that
// the image knows keeps the image's name; a name that the image gives to another gid is taken with the gid appended.
func groupLines(old string, u User) string {
	lines := split(old)
	lines = withGroup(lines, Group{Name: u.Login, GID: u.GID}, "")
	for _, g := range u.Groups {
		lines = withGroup(lines, g, u.Login)
	}
	return join(lines)
}

func withGroup(lines []string, g Group, member string) []string {
	gid, taken := strconv.Itoa(g.GID), false
	for i, line := range lines {
		f := strings.Split(line, ":")
		if len(f) < 4 {
			continue
		}
		if f[2] == gid {
			lines[i] = withMember(f, member)
			return lines
		}
		taken = taken || f[0] == g.Name
	}
	name := g.Name
	if taken || name == "" {
		name = strings.TrimPrefix(g.Name+"-"+gid, "-")
	}
	return append(lines, fmt.Sprintf("%s:x:%s:%s", name, gid, member))
}

func withMember(fields []string, member string) string {
	members := strings.FieldsFunc(fields[3], func(r rune) bool { return r == ',' })
	if member != "" && !slices.Contains(members, member) {
		members = append(members, member)
	}
	fields[3] = strings.Join(members, ",")
	return strings.Join(fields, ":")
}

// shadowLines gives old with a line for u that lets no password in; one that is there already is kept, so that a password that
// the user set stays. Without such a line, PAM's account check would turn the user away from sudo.
func shadowLines(old string, u User) string {
	lines := split(old)
	for _, line := range lines {
		if strings.HasPrefix(line, u.Login+":") {
			return join(lines)
		}
	}
	return join(append(lines, u.Login+":*:19000:0:99999:7:::"))
}

func split(text string) []string {
	text = strings.TrimRight(text, "\n")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

func join(lines []string) string { return strings.Join(lines, "\n") + "\n" }
