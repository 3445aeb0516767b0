package command

import (
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type projectView struct {
	Name        string   `json:"name"`
	Description string   `json:"description"`
	Members     []string `json:"members"`
}

func newProject(a *app) *cobra.Command {
	return group("project", "Projects: teams that are billed", newProjectList(a), newProjectCreate(a))
}

func newProjectList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List projects", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.users.ListProjects(cmd.Context(), connect.NewRequest(&carrelv1.ListProjectsRequest{}))
			if err != nil {
				return err
			}
			rows := each(resp.Msg.GetProjects(), func(p *carrelv1.Project) projectView {
				return projectView{p.GetName(), p.GetDescription(), emptyIfNil(p.GetMembers())}
			})
			return writeList(a, projectList(), rows, o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func projectList() output.List[projectView] {
	type col = output.Column[projectView]
	return output.List[projectView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(p projectView) string { return p.Name }},
			{Name: "members", Title: "MEMBERS", Text: func(p projectView) string { return orDash(strings.Join(p.Members, " ")) }, Value: func(p projectView) string { return strings.Join(p.Members, " ") }},
			{Name: "description", Title: "DESCRIPTION", Text: func(p projectView) string { return p.Description }},
		},
		ID:    func(p projectView) string { return p.Name },
		Empty: "no projects",
	}
}

func newProjectCreate(a *app) *cobra.Command {
	var description string
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a project (admins)", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.users.CreateProject(cmd.Context(), connect.NewRequest(&carrelv1.CreateProjectRequest{Project: &carrelv1.Project{Name: args[0], Description: description}}))
			if err != nil {
				return err
			}
			return a.print("%s", resp.Msg.GetProject().GetName())
		},
	}
	cmd.Flags().StringVar(&description, "description", "", "one line for people")
	return cmd
}
