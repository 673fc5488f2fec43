/** What a report shows, as `dcdm.viewing.page` wrote it into the page. */
export const data = JSON.parse(document.getElementById("data").textContent);
